// Puts data into a program before a step and takes its loss after it. Of each sequence a rank gets what the layout of
// the program's data says is its own.
#pragma once
#include <utility>
#include <vector>

#include "engine/data/mixture.h"
#include "engine/runtime/executor.h"
#include "strata/layout.h"
#include "strata/stages.h"

namespace strata {

// The value of a f32 or f64 scalar tensor.
double read_scalar(const Program& program, TensorId id, const void* data);

class Feed {
 public:
  // Throws Error when the model declares no data tensors "tokens" and "targets"; a stage of a pipeline may lack them.
  Feed(const Executor& executor, const BatchShape& batch);
  // Tokens and targets of a microbatch, whole: (micro_batch, sequence_length) of the batch shape. `document_starts`: of
  // a packed one; null: each sequence is a document.
  void put(size_t microbatch, const int32_t* tokens, const int32_t* targets,
           const int32_t* document_starts = nullptr) const;
  // Sequences from `first_sample` on, for every microbatch.
  void fill(const Mixture& data, int64_t first_sample) const;
  // Token ids below `vocabulary` drawn with `seed`: for measurements without data.
  void fill_random(int64_t vocabulary, uint64_t seed) const;
  // What losses are multiplied by when they are read, 1 until it is set: kLossWeight, which gradients have already.
  void weigh(double weight) { weight_ = weight; }
  double loss() const;                 // the sum over microbatches
  std::vector<double> losses() const;  // by microbatch

 private:
  BatchShape batch_;
  const Program* program_ = nullptr;
  double weight_ = 1;
  std::vector<int32_t*> tokens_, targets_, document_starts_;
  GlobalIndex own_;  // of a microbatch's tokens, those that this rank has
  int64_t count_ = 0;
  mutable std::vector<int32_t> sequences_;  // tokens, targets and documents of a microbatch, as the sampler gives them
  std::vector<std::pair<TensorId, const void*>> losses_;
};

}  // namespace strata
