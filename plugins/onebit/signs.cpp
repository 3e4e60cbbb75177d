// The loops over blocks: each reads its numbers once and writes its bits once. See signs.h.
#include "plugins/onebit/signs.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "plugins/quantized_exchange/streaming.h"
#include "strata/convert.h"
#include "strata/simd.h"

namespace strata::onebit {
namespace {

constexpr int kLanes = 16;
constexpr int64_t kGrain = 16;  // blocks worth a thread of their own

// As it crosses: bit r of signs[l] is that of element kLanes · r + l, so that lanes never meet.
struct Block {
  float without, with;  // a sign
  uint32_t signs[kLanes];
};
static_assert(kBlock == 32 * kLanes);

int64_t blocks_of(int64_t elements) { return (elements + kBlock - 1) / kBlock; }

// x has kBlock numbers, +0 behind the first `count`. Means are of sums by lane: the order is the same everywhere.
STRATA_SIMD void encode(const float* x, int64_t count, Block& block) {
  float without[kLanes] = {}, with[kLanes] = {};
  uint32_t signs[kLanes] = {};
  for (uint32_t r = 0; r < 32; ++r)
    for (int l = 0; l < kLanes; ++l) {
      const auto bits = std::bit_cast<uint32_t>(x[kLanes * r + l]), mask = uint32_t(int32_t(bits) >> 31);
      signs[l] |= (mask & 1) << r;
      without[l] += std::bit_cast<float>(bits & ~mask);
      with[l] += std::bit_cast<float>(bits & mask);
    }
  int64_t counted = 0;
  float sum_without = 0, sum_with = 0;
  for (int l = 0; l < kLanes; ++l) {
    counted += std::popcount(signs[l]);
    sum_without += without[l], sum_with += with[l];
    block.signs[l] = signs[l];
  }
  block.without = count > counted ? sum_without / float(count - counted) : 0.0f;
  block.with = counted > 0 ? sum_with / float(counted) : 0.0f;
  if (!std::isfinite(sum_without + sum_with)) block.without = block.with = sum_without + sum_with;
}

// A row of lanes at a time, in the compiler's vectors: left to itself it goes along the other dimension, in strides.
using Words = uint32_t __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
using Row = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

STRATA_SIMD void read(const Block& block, float* x) {
  const auto without = std::bit_cast<uint32_t>(block.without), both = std::bit_cast<uint32_t>(block.with) ^ without;
  const Words signs = *reinterpret_cast<const Words*>(block.signs);
  for (int r = 0; r < 32; ++r)
    *reinterpret_cast<Words*>(x + kLanes * r) = without ^ (both & -(signs >> uint32_t(r) & 1u));
}
STRATA_SIMD void add(const Block& block, float* x) {
  const auto without = std::bit_cast<uint32_t>(block.without), both = std::bit_cast<uint32_t>(block.with) ^ without;
  const Words signs = *reinterpret_cast<const Words*>(block.signs);
  for (int r = 0; r < 32; ++r) {
    const Words values = without ^ (both & -(signs >> uint32_t(r) & 1u));
    *reinterpret_cast<Row*>(x + kLanes * r) += reinterpret_cast<const Row&>(values);
  }
}

STRATA_SIMD void plus(const float* from, int64_t count, float* x) {
  for (int64_t i = 0; i < count; ++i) x[i] += from[i];
}

// error = x - what is read of the block
STRATA_SIMD void leave(const Block& block, const float* x, float* error) {
  const auto without = std::bit_cast<uint32_t>(block.without), both = std::bit_cast<uint32_t>(block.with) ^ without;
  const Words signs = *reinterpret_cast<const Words*>(block.signs);
  for (int r = 0; r < 32; ++r) {
    const Words values = without ^ (both & -(signs >> uint32_t(r) & 1u));
    *reinterpret_cast<Row*>(error + kLanes * r) =
        *reinterpret_cast<const Row*>(x + kLanes * r) - reinterpret_cast<const Row&>(values);
  }
}

}  // namespace

int64_t list_bytes(int64_t elements) { return blocks_of(elements) * int64_t(sizeof(Block)); }

void pack(Threads& threads, DType dtype, const void* from, int64_t elements, float* error, std::byte* list) {
  threads.split(blocks_of(elements), kGrain, [&](int64_t begin, int64_t end) {
    float x[kBlock], left[kBlock];
    Block block;
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * kBlock, count = std::min(kBlock, elements - first);
      to_f32(dtype, at(from, dtype, first), x, count);
      plus(error + first, count, x);
      std::fill(x + count, x + kBlock, 0.0f);
      encode(x, count, block);
      float* const to = count == kBlock ? error + first : left;
      if (std::isfinite(block.without))
        leave(block, x, to);
      else
        std::fill(to, to + kBlock, 0.0f);
      if (to == left) std::copy(left, left + count, error + first);
      std::memcpy(list + b * int64_t(sizeof(Block)), &block, sizeof(Block));
    }
  });
}

void unpack(Threads& threads, const std::byte* lists, int64_t sources, int64_t stride, int64_t elements, DType dtype,
            void* to) {
  const bool past = dtype == DType::f32 && 4 * elements >= kPastCaches;
  threads.split(blocks_of(elements), kGrain, [&](int64_t begin, int64_t end) {
    float sum[kBlock];
    Block block;
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * kBlock, count = std::min(kBlock, elements - first);
      for (int64_t source = 0; source < sources; ++source) {
        std::memcpy(&block, lists + source * stride + b * int64_t(sizeof(Block)), sizeof(Block));
        (source == 0 ? read : add)(block, sum);
      }
      if (past)
        store_past_caches(static_cast<float*>(to) + first, sum, count);
      else
        from_f32(dtype, sum, at(to, dtype, first), count);
    }
    if (past) drain_stores();
  });
}

}  // namespace strata::onebit
