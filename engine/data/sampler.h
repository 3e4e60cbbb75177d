// Which sequence of the data set is sample n of a run: a pure function of seed and n, so a resumed run needs no state.
#pragma once
#include <cstdint>
#include <vector>

#include "engine/data/token_file.h"

namespace strata {

class Sampler {
 public:
  // Sequences do not overlap but for the one token that is target of one and input of the next; none crosses files.
  // `data` must outlive the sampler. Throws Error when there is not one whole sequence.
  Sampler(const TokenDataset& data, int64_t sequence_length, bool shuffle, uint64_t seed);
  int64_t sequences() const { return starts_.back(); }  // in one epoch
  // tokens and targets of sample 0, 1, 2, …; sequence_length int32 each. Every epoch has an order of its own.
  void fill(int64_t sample, int32_t* tokens, int32_t* targets) const;

 private:
  const TokenDataset& data_;
  int64_t length_;
  bool shuffle_;
  uint64_t seed_;
  std::vector<int64_t> starts_;  // first sequence of each file; the last entry is their number
};

// A permutation of [0, size): four rounds of a Feistel network on Philox, walked until inside (Black and Rogaway 2002).
int64_t permuted(int64_t index, int64_t size, uint64_t seed, uint64_t epoch);

}  // namespace strata
