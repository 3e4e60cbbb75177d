// Conversions as integer arithmetic that vectorizes on every level of x86-64; see strata/convert.h.
#include "strata/convert.h"

#include <bit>
#include <cstring>

#include "strata/random.h"
#include "strata/simd.h"

namespace strata {
namespace {

STRATA_INLINE uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

STRATA_SIMD void from_bf16(const uint16_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = std::bit_cast<float>(uint32_t(from[i]) << 16);
}

STRATA_SIMD void to_bf16(const float* from, uint16_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(from[i]);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    to[i] = uint16_t((bits & 0x7FFFFFFF) > 0x7F800000 ? (bits >> 16 | 0x40) : rounded);
  }
}

STRATA_SIMD void from_f16(const uint16_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t size = from[i] & 0x7FFF, sign = uint32_t(from[i] & 0x8000) << 16;
    const float scaled = std::bit_cast<float>(size << 13) * 0x1p112f;  // rebias; denormals become normal
    const uint32_t bits = size >= 0x7C00 ? (size << 13 | 0x7F800000) : bits_of(scaled);
    to[i] = std::bit_cast<float>(bits | sign);
  }
}

STRATA_SIMD void to_f16(const float* from, uint16_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(from[i]) & 0x7FFFFFFF, sign = bits_of(from[i]) >> 16 & 0x8000;
    const uint32_t normal = (bits + 0xFFF + (bits >> 13 & 1) - (112u << 23)) >> 13;
    // Adding 1/2, whose last bit is worth 2^-24 as that of a denormal f16, rounds to the latter's grid.
    const uint32_t denormal = bits_of(std::bit_cast<float>(bits) + 0.5f) - bits_of(0.5f);
    uint32_t result = bits < (113u << 23) ? denormal : normal;
    result = bits >= 0x477FF000 ? 0x7C00 : result;  // from 65520 on
    result = bits > 0x7F800000 ? 0x7E00 : result;   // NaN
    to[i] = uint16_t(result | sign);
  }
}

}  // namespace

void to_f32(DType dtype, const void* from, float* to, int64_t count) {
  if (dtype == DType::bf16)
    from_bf16(static_cast<const uint16_t*>(from), to, count);
  else if (dtype == DType::f16)
    from_f16(static_cast<const uint16_t*>(from), to, count);
  else
    std::memcpy(to, from, size_t(count) * 4);
}

void from_f32(DType dtype, const float* from, void* to, int64_t count) {
  if (dtype == DType::bf16)
    to_bf16(from, static_cast<uint16_t*>(to), count);
  else if (dtype == DType::f16)
    to_f16(from, static_cast<uint16_t*>(to), count);
  else
    std::memcpy(to, from, size_t(count) * 4);
}

void convert(DType source, const void* from, DType target, void* to, int64_t count) {
  float chunk[1024];
  for (int64_t i = 0; i < count; i += 1024) {
    const int64_t some = std::min<int64_t>(1024, count - i);
    to_f32(source, at(from, source, i), chunk, some);
    from_f32(target, chunk, at(to, target, i), some);
  }
}

void to_bf16_stochastically(const float* from, uint16_t* to, int64_t count, uint64_t seed, uint64_t stream,
                            int64_t first) {
  for (int64_t i = 0; i < count;) {
    // A block of Philox gives eight numbers of 16 bits.
    const uint64_t block = uint64_t(first + i) / 8;
    const auto words = random_block(seed, stream, block);
    for (int64_t lane = (first + i) % 8; lane < 8 && i < count; ++lane, ++i) {
      const uint32_t bits = bits_of(from[i]), noise = words[size_t(lane / 2)] >> (lane % 2 * 16) & 0xFFFF;
      const bool finite = (bits & 0x7F800000) != 0x7F800000;
      to[i] = uint16_t(finite ? (bits + noise) >> 16 : bits >> 16 | ((bits & 0x7FFFFF) ? 0x40 : 0));
    }
  }
}

}  // namespace strata
