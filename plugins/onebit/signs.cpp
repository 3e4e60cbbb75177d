// The loops over blocks: each reads its numbers once and writes its bits once. See signs.h.
#include "plugins/onebit/signs.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "strata/convert.h"
#include "strata/simd.h"

namespace strata::onebit {
namespace {

constexpr int kLanes = 16;
constexpr int64_t kWords = kBlock / 32;
constexpr int64_t kGrain = 16;  // blocks worth a thread of their own

struct Values {
  float of[2];  // without a sign, with one
};

int64_t blocks_of(int64_t elements) { return (elements + kBlock - 1) / kBlock; }
int64_t words_of(int64_t elements) { return (elements + 31) / 32; }

// x has kBlock numbers, +0 behind the first `count`. Means are of sums in kLanes parts: the order is the same
// everywhere.
STRATA_SIMD Values encode(const float* x, int64_t count, uint32_t* words) {
  float positive[kLanes] = {}, negative[kLanes] = {};
  for (int64_t i = 0; i < kBlock; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      const bool sign = std::bit_cast<uint32_t>(x[i + l]) >> 31;
      positive[l] += sign ? 0.0f : x[i + l];
      negative[l] += sign ? x[i + l] : 0.0f;
    }
  for (int64_t w = 0; w < kWords; ++w) {
    uint32_t word = 0;
    for (uint32_t j = 0; j < 32; ++j) word |= std::bit_cast<uint32_t>(x[32 * w + j]) >> 31 << j;
    words[w] = word;
  }
  int64_t with = 0;
  for (int64_t w = 0; w < kWords; ++w) with += std::popcount(words[w]);
  float sums[2] = {};
  for (int l = 0; l < kLanes; ++l) sums[0] += positive[l], sums[1] += negative[l];
  Values values{{count > with ? sums[0] / float(count - with) : 0.0f, with > 0 ? sums[1] / float(with) : 0.0f}};
  if (!std::isfinite(sums[0] + sums[1])) values.of[0] = values.of[1] = sums[0] + sums[1];
  return values;
}

STRATA_SIMD void add(const uint32_t* words, Values values, float* x) {
  for (int64_t w = 0; w < kWords; ++w)
    for (uint32_t j = 0; j < 32; ++j) x[32 * w + j] += (words[w] >> j & 1) != 0 ? values.of[1] : values.of[0];
}

}  // namespace

int64_t list_bytes(int64_t elements) { return blocks_of(elements) * int64_t(sizeof(Values)) + 4 * words_of(elements); }

void pack(Threads& threads, DType dtype, const void* from, int64_t elements, float* error, std::byte* list) {
  std::byte* const bits = list + blocks_of(elements) * int64_t(sizeof(Values));
  threads.split(blocks_of(elements), kGrain, [&](int64_t begin, int64_t end) {
    float x[kBlock], sent[kBlock];
    uint32_t words[kWords];
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock, count = std::min(kBlock, elements - first);
      to_f32(dtype, at(from, dtype, first), x, count);
      for (int64_t i = 0; i < count; ++i) x[i] += error[first + i];
      std::fill(x + count, x + kBlock, 0.0f);
      const Values values = encode(x, count, words);
      std::fill(sent, sent + kBlock, 0.0f);
      add(words, values, sent);
      const bool finite = std::isfinite(values.of[0]);
      for (int64_t i = 0; i < count; ++i) error[first + i] = finite ? x[i] - sent[i] : 0.0f;
      std::memcpy(list + block * int64_t(sizeof(Values)), &values, sizeof(Values));
      std::memcpy(bits + first / 8, words, size_t(4 * words_of(count)));
    }
  });
}

void unpack(Threads& threads, const std::byte* lists, int64_t sources, int64_t stride, int64_t elements, DType dtype,
            void* to) {
  threads.split(blocks_of(elements), kGrain, [&](int64_t begin, int64_t end) {
    float sum[kBlock];
    uint32_t words[kWords] = {};
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock, count = std::min(kBlock, elements - first);
      std::fill(sum, sum + kBlock, 0.0f);
      for (int64_t source = 0; source < sources; ++source) {
        const std::byte* const list = lists + source * stride;
        Values values;
        std::memcpy(&values, list + block * int64_t(sizeof(Values)), sizeof(Values));
        std::memcpy(words, list + blocks_of(elements) * int64_t(sizeof(Values)) + first / 8,
                    size_t(4 * words_of(count)));
        add(words, values, sum);
      }
      from_f32(dtype, sum, at(to, dtype, first), count);
    }
  });
}

}  // namespace strata::onebit
