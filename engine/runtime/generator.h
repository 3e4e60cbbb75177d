// Samples text from a trained model, one token at a time. Runs the whole window again for each token: a training
// engine's check on what was learned, not an inference server.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/runtime/assembly.h"

namespace strata {

struct SamplingOptions {
  int64_t tokens = 256;
  double temperature = 0.8;  // 0: the most probable token
  int64_t top_k = 0;         // 0: all
  uint64_t seed = 1;
};

class Generator {
 public:
  // Loads the parameters of `checkpoint` (a checkpoint folder).
  Generator(const Session& session, const std::string& checkpoint);
  // Appends sampled tokens to `prompt`, telling each to `emit` as it comes.
  void generate(std::vector<int32_t> prompt, const SamplingOptions& options, const std::function<void(int32_t)>& emit);
  // Logits (tokens.size(), vocabulary) of a sequence no longer than data.sequence_length.
  std::vector<float> logits(const std::vector<int32_t>& tokens);
  int64_t vocabulary() const { return assembly_.plans.main().built.vocabulary; }

 private:
  std::unique_ptr<World> world_;
  Assembly assembly_;
  int64_t window_;
};

}  // namespace strata
