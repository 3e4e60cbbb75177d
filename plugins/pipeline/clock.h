// The stages of a pipeline on one virtual clock: what a schedule takes and keeps, from costs of chunks alone. The
// prediction of a real plan is another thing (engine/planning/predict.h).
#pragma once
#include <cstdint>
#include <vector>

#include "plugins/pipeline/actions.h"

namespace strata::pipeline {

struct StageTime {
  double begin = 0, end = 0, busy = 0;  // seconds, of passes
  int64_t peak_bytes = 0;               // of activations (ChunkCost)
  int peak_count = 0;                   // of microbatches' chunks that wait for their input gradient or weight gradient
};

struct Timing {
  double makespan = 0;
  std::vector<StageTime> stages;
  // The longest from a stage's first pass to its last: steps that follow each other so closely, each stage going on
  // without waiting for the others, take that long each.
  double span() const;
  // What of that is not busy, as a part of the time that the busiest stage has passes for: 0 is none.
  double bubble() const;
  int64_t peak_bytes() const;
};

enum class Sends {
  buffered,  // from one stage to another: a transfer begins when what it sends is made and the one before has ended
  waiting,   // as require_no_deadlock says
};

// Throws Error where stages would wait for each other.
Timing clock(const Problem& problem, const Actions& actions, Sends sends = Sends::buffered);

// By stage, from the order of passes alone.
std::vector<int64_t> peak_bytes(const Problem& problem, const Schedule& schedule);

}  // namespace strata::pipeline
