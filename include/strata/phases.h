// Phases of a run: sets of steps in which the step's program is another one, such as a warm-up or every eighth step.
// Plugins declare them before anything is planned (Plugin::phases). The engine plans a program for each combination of
// phases that a step can be in, all over the same persistent tensors, and runs the one of the step.
#pragma once
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace strata {

// Steps of a run, counted from 1: `first`, `first` + `every`, `first` + 2 `every`, … up to `last`.
struct Steps {
  static constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();
  int64_t first = 1;
  int64_t last = kEnd;
  int64_t every = 1;
  bool contain(int64_t step) const { return step >= first && step <= last && (step - first) % every == 0; }
  bool operator==(const Steps&) const = default;
};
std::string text(const Steps& steps);  // "from step 4 on", "steps 1 to 9", "steps 4, 8, 12, …"

// stage `phases`: called once, before all others. What is declared must not depend on [run] steps, or a run that is
// made longer would go on with other programs than it was begun with.
class PhaseStage {
 public:
  // Names are everybody's: a second phase of one name is an Error, so begin it with what the plugin does
  // ("local steps: exchange"). Error, too, for steps that are none.
  void declare(std::string name, const Steps& steps);

 private:
  friend class PhaseTable;
  struct Declared {
    std::string name;
    Steps steps;
    std::string by;  // the plugin
  };
  std::vector<Declared> declared_;
  std::string plugin_;  // whose turn it is
};

// Which of the phases a program is for; every stage of planning has it. Programs that are not for steps (validation,
// generation) are in none.
class Phases {
 public:
  Phases() = default;
  // Throws Error for a name that no plugin has declared.
  bool in(std::string_view name) const;
  std::string text() const;  // "a + b", or "no phase"; empty where none is declared
  // Whether the first step of a run is among the program's, and whether it is the only one: nothing is left over there
  // from a step before.
  bool has_first_step() const { return has_first_step_; }
  bool is_first_step() const { return is_first_step_; }
  bool operator==(const Phases&) const = default;

 private:
  friend class PhaseTable;
  std::vector<std::pair<std::string, bool>> all_;  // as declared, and whether the program is for its steps
  bool declared_ = false;  // plugins have been asked: other names are wrong, and not only not known yet
  bool has_first_step_ = true, is_first_step_ = false;
};

}  // namespace strata
