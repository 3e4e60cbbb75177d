// The step loop: data in, program run, hooks called, log written, checkpoints saved, validation measured.
#pragma once
#include <cstdint>
#include <string>

#include "engine/runtime/session.h"

namespace strata {

struct TrainSummary {
  int64_t steps = 0;             // the last step done
  double loss = 0;               // of that step, nats a token
  double validation_loss = 0;    // NaN when there is no validation data
  double tokens_per_second = 0;  // median over the steps
  bool interrupted = false;      // SIGINT or SIGTERM: the step was finished and a checkpoint saved
};

struct TrainOptions {
  bool resume = false;  // from the newest checkpoint in run.directory
  std::string trace;    // file for a trace of the last step (Chrome, Perfetto); empty: none
};

// Trains as the configuration says. Progress to stderr, a
// summary with planned and measured memory to stdout. Throws Error: usage for bad input, failed when the run cannot go
// on (a loss that is not finite; the last checkpoint is intact).
TrainSummary train(Session& session, const TrainOptions& options);

}  // namespace strata
