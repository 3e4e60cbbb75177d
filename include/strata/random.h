// Counter-based random numbers: Philox 4x32-10 (Salmon et al., SC'11, "Parallel random numbers: as easy as 1, 2, 3").
// A value depends only on (seed, stream, index): the same under every layout, restart and recomputation.
#pragma once
#include <array>
#include <cstdint>
#include <string_view>

#include "strata/simd.h"

namespace strata {

// Four 32-bit words for a 128-bit counter and a 64-bit key.
STRATA_INLINE std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {uint32_t(b >> 32) ^ counter[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ counter[3] ^ key1, uint32_t(a)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

// Names a stream of random numbers (FNV-1a), for keys made of a tensor's or op's name.
constexpr uint64_t stream_of(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

// Word `index` of the stream: block index/4, word index%4. Key: seed; counter: block index and stream.
STRATA_INLINE std::array<uint32_t, 4> random_block(uint64_t seed, uint64_t stream, uint64_t block) {
  return philox({uint32_t(block), uint32_t(block >> 32), uint32_t(stream), uint32_t(stream >> 32)}, uint32_t(seed),
                uint32_t(seed >> 32));
}

// Standard normal values for global element indices [first, first + count) by Box-Muller; same values whatever the
// split.
void fill_normal(float* values, int64_t first, int64_t count, double standard_deviation, uint64_t seed,
                 uint64_t stream);

}  // namespace strata
