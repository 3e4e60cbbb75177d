// What bounds a step: how long each resource is busy in it, which one is longest, and what would hide that one behind
// compute. From a prediction; nothing is run.
#pragma once
#include <string>
#include <vector>

#include "engine/planning/predict.h"

namespace strata {

// A stream's work in a step, in seconds: what every microbatch brings, all of them together, and the rest.
struct Busy {
  Stream stream = Stream::compute;
  double by_microbatch = 0, once = 0;
  double seconds() const { return by_microbatch + once; }
};

struct Roofline {
  std::vector<Busy> streams{};  // those that do anything, the busiest first
  double reached = 0;           // share of the step in which the busiest works
  // How many times as many microbatches hide it behind compute; 1 or less: it is hidden (or is compute); 0: none do.
  double microbatches = 0;
  size_t disks = 1;  // of the NVMe tier
};

Roofline roofline(const Program& program, const Prediction& prediction);
// "busy: …", and "the step is bound by reads from NVMe: 91.200 s, 93% of it; … halves them".
std::string roofline_text(const Roofline& roofline);

}  // namespace strata
