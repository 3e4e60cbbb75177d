// Stateless shuffling; see sampler.h.
#include "engine/data/sampler.h"

#include <algorithm>
#include <bit>

#include "strata/error.h"
#include "strata/random.h"

namespace strata {

// Four would do for large sizes, but below a hundred sequences some places would be likelier than others.
constexpr uint32_t kRounds = 8;

int64_t permuted(int64_t index, int64_t size, uint64_t seed, uint64_t epoch) {
  STRATA_CHECK(0 <= index && index < size);
  const int half = std::max(1, (int(std::bit_width(uint64_t(size - 1))) + 1) / 2);  // bits of each half, up to 32
  const uint64_t mask = (uint64_t{1} << half) - 1;
  uint64_t value = uint64_t(index);
  do {
    uint64_t left = value >> half, right = value & mask;
    for (uint32_t round = 0; round < kRounds; ++round) {
      const auto words = philox({uint32_t(right), round, uint32_t(epoch), uint32_t(epoch >> 32)}, uint32_t(seed),
                                uint32_t(seed >> 32));
      const uint64_t mixed = left ^ (words[0] & mask);
      left = right;
      right = mixed;
    }
    value = left << half | right;
  } while (value >= uint64_t(size));
  return int64_t(value);
}

Sampler::Sampler(const TokenDataset& data, int64_t sequence_length, bool shuffle, uint64_t seed)
    : data_(data), length_(sequence_length), shuffle_(shuffle), seed_(seed), starts_{0} {
  STRATA_CHECK(length_ > 0);
  for (const TokenFile& file : data.files()) starts_.push_back(starts_.back() + (file.tokens() - 1) / length_);
  if (sequences() > 0) return;
  const size_t files = data.files().size();
  throw Error(data.files().front().path() + (files > 1 ? " and " + std::to_string(files - 1) + " more" : "") + ": " +
              (files > 1 ? "no file holds " : "does not hold ") + "one sequence of " + std::to_string(length_) +
              " tokens and the token after it (" + std::to_string(data.tokens()) +
              " tokens in all); use more text or lower data.sequence_length.");
}

void Sampler::fill(int64_t sample, int32_t* tokens, int32_t* targets) const {
  STRATA_CHECK(sample >= 0);
  const int64_t epoch = sample / sequences();
  int64_t sequence = sample % sequences();
  if (shuffle_) sequence = permuted(sequence, sequences(), seed_, uint64_t(epoch));
  const size_t file = size_t(std::upper_bound(starts_.begin(), starts_.end(), sequence) - starts_.begin()) - 1;
  const int64_t at = (sequence - starts_[file]) * length_;
  data_.files()[file].read(at, length_, tokens);
  std::copy(tokens + 1, tokens + length_, targets);
  data_.files()[file].read(at + length_, 1, targets + length_ - 1);
}

}  // namespace strata
