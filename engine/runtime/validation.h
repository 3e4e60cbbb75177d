// The validation loss: the run's program for it, over the parameters of training, run between steps.
#pragma once
#include "engine/data/sampler.h"
#include "engine/data/token_file.h"
#include "engine/runtime/assembly.h"
#include "engine/runtime/feed.h"

namespace strata {

class Validation {
 public:
  // `assembly` has a program for validation. All must outlive this. Throws Error for data that the model cannot take.
  Validation(const Session& session, Assembly& assembly);
  // Mean loss, nats a token, over run.validate_batches microbatches at most, the same ones each time; all ranks call it
  // and get the same.
  double loss();

 private:
  const Session& session_;
  const Groups& groups_;
  TokenDataset dataset_;
  Sampler sampler_;
  Executor& executor_;
  Feed feed_;
};

}  // namespace strata
