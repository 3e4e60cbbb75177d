// Samples tokens after prompts, one at a time, from the logits of a trained model (next_logits.h).
#pragma once
#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <vector>

#include "engine/runtime/next_logits.h"

namespace strata {

struct SamplingOptions {
  int64_t tokens = 256;
  double temperature = 0.8;  // 0: the most probable token
  int64_t top_k = 0;         // 0: all
  double top_p = 1;          // the most probable tokens that together have this much; 1: all
  uint64_t seed = 1;
  std::set<int32_t> ends{};  // tokens that end a sequence; they are not told
};

// One draw from softmax(logits / temperature) over what top_k and then top_p leave; ties go to the smaller id. Number
// `draw` of the seed's.
int32_t sample(std::span<const float> logits, const SamplingOptions& options, uint64_t draw);

// Goes on with each prompt until it has options.tokens more, or its end. `emit` is told each token as it comes, with
// the number of the prompt; what a prompt gives does not depend on the others but in rounding. An empty prompt begins
// with token 0. Throws Error for a token that the model does not know.
void generate(NextLogits& model, std::vector<std::vector<int32_t>> prompts, const SamplingOptions& options,
              const std::function<void(size_t prompt, int32_t id)>& emit);

}  // namespace strata
