// How likely a trained model finds sequences of tokens: the program of validation, one sequence at a time. What is
// asked of it, files of tokens and multiple choice, is evaluation.h's.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "engine/runtime/assembly.h"
#include "engine/runtime/feed.h"

namespace strata {

class Evaluator {
 public:
  // Sequences of at most data.sequence_length of the session, which must outlive this. Plans for one rank, under the
  // session's memory budgets, and loads the parameters of `checkpoint` (a checkpoint's folder).
  Evaluator(Session& session, const std::string& checkpoint);

  // Minus the logarithm of the probability of tokens[first] to the last, each after all before it: nats. `first` is at
  // least 1, and there are at most window() + 1 tokens.
  double loss(std::span<const int32_t> tokens, int64_t first = 1);
  // The same of a whole window: of each token the next one where it counts, or -1. `document_starts`: of a session with
  // data.packed; null: it is one document.
  double loss(const int32_t* tokens, const int32_t* targets, const int32_t* document_starts = nullptr);
  bool packed() const { return packed_; }
  int64_t window() const { return int64_t(tokens_.size()); }
  int64_t vocabulary() const { return assembly_.plans.main().built.vocabulary; }

 private:
  std::unique_ptr<World> world_;
  bool packed_;
  Assembly assembly_;
  Feed feed_;
  std::vector<int32_t> tokens_, targets_;
};

}  // namespace strata
