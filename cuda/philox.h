// Philox 4x32-10 on the GPU: the words of strata/random.h.
#pragma once
#include "cuda/kernel.h"

namespace strata::cuda {

struct Words {
  uint32_t word[4];
};

STRATA_DEVICE Words random_words(uint64_t seed, uint64_t stream, uint64_t block) {
  Words c{{uint32_t(block), uint32_t(block >> 32), uint32_t(stream), uint32_t(stream >> 32)}};
  uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, c.word[0]), low0 = 0xD2511F53u * c.word[0];
    const uint32_t high1 = __umulhi(0xCD9E8D57u, c.word[2]), low1 = 0xCD9E8D57u * c.word[2];
    c = {{high1 ^ c.word[1] ^ key0, low1, high0 ^ c.word[3] ^ key1, low0}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// One of four words, without memory that is indexed.
STRATA_DEVICE uint32_t pick(const Words& words, uint32_t i) {
  return i == 0 ? words.word[0] : i == 1 ? words.word[1] : i == 2 ? words.word[2] : words.word[3];
}

}  // namespace strata::cuda
