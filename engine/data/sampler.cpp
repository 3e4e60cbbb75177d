// Stateless shuffling; see sampler.h.
#include "engine/data/sampler.h"

#include <algorithm>
#include <bit>

#include "strata/error.h"
#include "strata/random.h"

namespace strata {

int64_t permuted(int64_t index, int64_t size, uint64_t seed, uint64_t epoch) {
  const int half = std::max(1, (int(std::bit_width(uint64_t(size - 1))) + 1) / 2);
  const uint64_t mask = (uint64_t{1} << half) - 1;
  uint64_t value = uint64_t(index);
  do {
    uint64_t left = value >> half, right = value & mask;
    for (uint32_t round = 0; round < 4; ++round) {
      const auto words = philox({uint32_t(right), uint32_t(right >> 32), uint32_t(epoch), uint32_t(epoch >> 32) ^ (round << 24)}, uint32_t(seed), uint32_t(seed >> 32));
      const uint64_t mixed = left ^ ((uint64_t(words[0]) << 32 | words[1]) & mask);
      left = right;
      right = mixed;
    }
    value = left << half | right;
  } while (value >= uint64_t(size));
  return int64_t(value);
}

Sampler::Sampler(const TokenDataset& data, int64_t sequence_length, bool shuffle, uint64_t seed)
    : data_(data), length_(sequence_length), shuffle_(shuffle), seed_(seed), starts_{0} {
  for (const TokenFile& file : data.files()) starts_.push_back(starts_.back() + std::max<int64_t>(0, (file.tokens() - 1) / length_));
  if (starts_.back() == 0)
    throw Error("the data holds " + std::to_string(data.tokens()) + " tokens, less than one sequence of " + std::to_string(length_) +
                " and its next token; use more text or lower data.sequence_length.");
}

void Sampler::fill(int64_t sample, int32_t* tokens, int32_t* targets) const {
  const int64_t count = sequences(), epoch = sample / count;
  int64_t sequence = sample % count;
  if (shuffle_) sequence = permuted(sequence, count, seed_, uint64_t(epoch));
  const size_t file = size_t(std::upper_bound(starts_.begin(), starts_.end(), sequence) - starts_.begin()) - 1;
  const int64_t at = (sequence - starts_[file]) * length_;
  data_.files()[file].read(at, length_, tokens);
  data_.files()[file].read(at + 1, length_, targets);
}

}  // namespace strata
