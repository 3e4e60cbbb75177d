// What exchanges take in the steps of a run: the fastest of those that are alike shows what the wire takes, and all of
// them on the average how long ranks wait for others that come late. That differs from step to step: the half of the
// steps counts that are neither short nor long.
#pragma once
#include <string>
#include <vector>

#include "engine/planning/rates.h"
#include "engine/planning/stalls.h"

namespace strata {

class ExchangeTimes {
 public:
  // Of the steps of a program. `rates`: whose links say how many ranks take part.
  ExchangeTimes(const Program& program, const Rates& rates);

  // A step that is over; no spans: nobody looked.
  void add(const std::vector<Span>& spans);

  // Exchanges of one kind over one axis with as many bytes, on the average of those steps.
  struct Times {
    std::string axis, kind;
    double bytes = 0;             // that a rank hands to others
    double fewest = 0, mean = 0;  // seconds, of the fastest and of all
    bool tells_late = true;  // enough calls, of all ranks of the axis, to tell who was late from what the wire takes
  };
  std::vector<Times> times() const;

 private:
  struct Group {
    Times what;
    std::vector<size_t> ops;
  };
  struct Step {
    double seconds = 0;                 // of all exchanges
    std::vector<double> fewest, means;  // by group
  };
  std::vector<Group> groups_;
  std::vector<Step> steps_;  // the last ones
};

}  // namespace strata
