// The validation loss: the run's program for it, over the parameters of training, run between steps.
#pragma once
#include "engine/runtime/assembly.h"
#include "engine/runtime/feed.h"
#include "engine/runtime/run_data.h"

namespace strata {

class Validation {
 public:
  // `assembly` has a program for validation. All must outlive this. Throws Error for data that the model cannot take,
  // and where no token of it counts.
  Validation(const Session& session, Assembly& assembly);
  // Mean loss, nats a token that counts, over run.validate_batches microbatches at most, the same ones each time; all
  // ranks call it and get the same.
  double loss();

 private:
  const Session& session_;
  const Groups& groups_;
  RunData data_;
  int64_t batches_;  // microbatches
  double counted_;   // share of their targets
  Executor& executor_;
  Feed feed_;
};

}  // namespace strata
