// The step loop: data in, program run, hooks called, log written, checkpoints saved, validation measured.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include "engine/runtime/session.h"

namespace strata {

struct TrainSummary {
  int64_t steps = 0;             // the last step done; 0: none
  int64_t made = 0;              // of them by this call
  double loss = 0;               // of that step, nats a token
  double validation_loss = 0;    // NaN when there is no validation data
  double tokens_per_second = 0;  // median over the steps
  bool interrupted = false;      // asked to stop: the step was finished, and saved if it was one of this call's
  std::string unsaved;           // why the last step is in no checkpoint; empty: it is
};

struct TrainOptions {
  bool resume = false;  // from the newest checkpoint in run.directory
  std::string trace{};  // file for a trace of the last step (Chrome, Perfetto); empty: none
  // Becomes true when the run is to stop; one rank's is enough. Looked at before the first step, after each, and after
  // each validation and checkpoint.
  const std::atomic<bool>* stop = nullptr;
};

// Trains as the configuration says. Progress to stderr, a
// summary with planned and measured memory to stdout. Throws Error: usage for bad input, failed when the run cannot go
// on (a loss that is not finite; the last checkpoint is intact). A full disk does not end it: see `unsaved`.
TrainSummary train(Session& session, const TrainOptions& options);

}  // namespace strata
