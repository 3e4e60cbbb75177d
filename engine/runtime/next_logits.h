// The logits of what follows sequences of tokens, of a trained model: with keys and values kept in a cache, or from the
// whole window for each token. Chooses no token (generator.h).
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/runtime/assembly.h"

namespace strata {

class NextLogits {
 public:
  virtual ~NextLogits() = default;
  virtual int64_t vocabulary() const = 0;
  // To `logits` (sequences, vocabulary). Each sequence has a token at least; of a longer one than window() the last
  // tokens count. A pure function of the sequences: what is kept from call to call only makes it faster where each
  // begins as it did.
  virtual void of(std::span<const std::vector<int32_t>> sequences, float* logits) = 0;
};

// Puts parameters into the memory of programs.
using FillParameters = std::function<void(Storage&)>;

// Keys and values of the tokens so far are kept, so a token costs what it alone does. `sequences` at most, of whose
// prompts the longest has `longest` tokens or so. A sequence that has outgrown the window (data.sequence_length) begins
// at another token each time, so all of it is computed anew. `session` must outlive the result.
std::unique_ptr<NextLogits> cached_logits(const Session& session, int64_t sequences, int64_t longest,
                                          const FillParameters& fill);
// Runs the whole window for each token of each sequence: on every backend, and to compare with.
std::unique_ptr<NextLogits> whole_window_logits(const Session& session, const FillParameters& fill);

}  // namespace strata
