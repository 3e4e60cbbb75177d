// Local search over residency decisions: beside the series of plans that relief makes (residency.h), what one changed
// decision does to each of the best plans known, and to those that come of it (Pareto local search: Paquete,
// Chiarandini and Stuetzle, "Pareto local optimum sets in the biobjective traveling salesman problem", 2004). It knows
// no budget and keeps every plan that no other is both smaller and faster than, so a larger budget never finds a slower
// one.
#pragma once
#include <array>
#include <deque>
#include <functional>
#include <optional>
#include <unordered_set>
#include <vector>

#include "engine/planning/homes.h"
#include "engine/planning/materialize.h"

namespace strata {

// All that is decided about a plan.
struct Choice {
  Decisions decisions;
  std::vector<Tier> homes{};  // by tensor
  int64_t room = 0;           // bytes of the device for bringing back early
};

class LocalSearch {
 public:
  struct Reached {
    std::array<int64_t, kTiers> bytes{};
    double seconds = 0;    // predicted
    bool limited = false;  // with more room something would come back earlier
  };
  struct Point {
    Choice choice;
    Reached reached;
  };
  // Nothing where a choice is not worth planning to its end.
  using Plan = std::function<std::optional<Reached>(const Choice&)>;

  // `demanded`: decisions that stay as they are. `room`: the most that moves may take.
  LocalSearch(const Program& program, const Uses& uses, const Homes& homes, const Decisions& demanded, int64_t room);

  // Plans `begin`, then neighbours of the best, at most `most` choices in all. Calling it once is enough.
  void run(const std::vector<Choice>& begin, size_t most, const Plan& plan);
  // What no other is at most as large as and faster than.
  const std::vector<Point>& front() const { return front_; }

 private:
  // Decides one thing of one tensor, or of all that are alike in other blocks and microbatches.
  struct Change {
    std::vector<Gap> gaps{};
    std::optional<Decision> decision{};  // nothing: it stays where it is
    std::vector<int32_t> tensors{};      // whose home changes instead
    Tier home = Tier::device;
  };
  void add_changes_of_gaps(const Homes& homes, const Uses& uses, const Decisions& demanded);
  void add_changes_of_homes();
  std::vector<Decision> ways_of(const Homes& homes, Gap gap) const;
  std::optional<Choice> changed(const Choice& choice, const Change& change) const;
  void try_choice(Choice choice, const Plan& plan);
  void keep(Choice choice, const Reached& reached);

  const Program& program_;
  const int64_t room_;
  std::vector<Change> changes_;
  std::vector<Point> front_;
  std::deque<Point> to_visit_;  // in the order in which they came to the front
  std::deque<Point> as_good_;   // as one of the front, by other decisions: when nothing else is left
  std::unordered_set<size_t> tried_;
  size_t left_ = 0;
};

}  // namespace strata
