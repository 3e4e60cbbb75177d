// Which sequence of the data set is sample n of a run: a pure function of seed and n, so a resumed run needs no state.
#pragma once
#include <cstdint>
#include <vector>

#include "engine/data/token_file.h"

namespace strata {

class Sampler {
 public:
  // A file of n tokens holds (n - 1) / sequence_length sequences: they do not overlap but for the one token that is
  // target of one and input of the next, and none crosses files. `data` must outlive the sampler.
  // Throws Error when there is not one whole sequence.
  Sampler(const TokenDataset& data, int64_t sequence_length, bool shuffle, uint64_t seed);
  int64_t sequences() const { return starts_.back(); }  // in one epoch
  // Tokens and targets (the tokens one later) of sample 0, 1, 2, …; sequence_length int32 each. Sample n belongs to
  // epoch n / sequences(); with `shuffle` every epoch has an order of its own. Any thread may call it.
  void fill(int64_t sample, int32_t* tokens, int32_t* targets) const;

 private:
  const TokenDataset& data_;
  int64_t length_;
  bool shuffle_;
  uint64_t seed_;
  std::vector<int64_t> starts_;  // first sequence of each file; the last entry is their number
};

// Where a random permutation of [0, size) puts `index`: eight rounds of a Feistel network keyed by Philox over the next
// power of four, walked until the result is inside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
// Below four walks on average; needs 0 <= index < size.
int64_t permuted(int64_t index, int64_t size, uint64_t seed, uint64_t epoch);

}  // namespace strata
