// The loops over blocks: each reads its numbers once and writes its codes once. See codes.h.
#include "plugins/quantized_exchange/codes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "plugins/gist/codec_formats.h"  // the code of e4m3
#include "strata/convert.h"
#include "strata/random.h"

namespace strata::quantized {
namespace {

constexpr int kBlocksOfEight = kBlock / 8;

int64_t blocks_of(int64_t elements) { return (elements + kBlock - 1) / kBlock; }
int64_t code_bytes(Format format, int64_t elements) {
  return format == Format::int4 ? (elements + 1) / 2 : format == Format::bf16 ? 2 * elements : elements;
}
std::byte* codes_of(Format format, std::byte* packed, int64_t elements) {
  return packed + (format == Format::bf16 ? 0 : 4 * blocks_of(elements));
}

// Two numbers in (0, 1) of each word, the middles of 2^16 intervals: those of the lower halves, then the others.
STRATA_INLINE void put(const uint32_t* words, float* out) {
  for (int l = 0; l < kBlocksOfEight; ++l) {
    out[l] = (float(words[l] & 0xFFFF) + 0.5f) * 0x1p-16f;
    out[kBlocksOfEight + l] = (float(words[l] >> 16) + 0.5f) * 0x1p-16f;
  }
}

// A number in (0, 1) for each element of a block: philox() of strata/random.h, kBlocksOfEight counters side by side.
STRATA_INLINE void fill(const Noise& noise, uint32_t block, uint32_t scale, float* out) {
  uint32_t c0[kBlocksOfEight], c1[kBlocksOfEight], c2[kBlocksOfEight], c3[kBlocksOfEight];
  for (uint32_t l = 0; l < kBlocksOfEight; ++l)
    c0[l] = block * kBlocksOfEight + l, c1[l] = block >> 27, c2[l] = noise.step, c3[l] = scale;
  uint32_t key0 = noise.seed, key1 = noise.stream;
  for (int round = 0; round < 10; ++round) {
    for (int l = 0; l < kBlocksOfEight; ++l) {
      const uint64_t a = uint64_t{0xD2511F53} * c0[l], b = uint64_t{0xCD9E8D57} * c2[l];
      const uint32_t first = uint32_t(b >> 32) ^ c1[l] ^ key0, third = uint32_t(a >> 32) ^ c3[l] ^ key1;
      c1[l] = uint32_t(b), c3[l] = uint32_t(a), c0[l] = first, c2[l] = third;
    }
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  put(c0, out), put(c1, out + 2 * kBlocksOfEight), put(c2, out + 4 * kBlocksOfEight), put(c3, out + 6 * kBlocksOfEight);
}

// The scale under which the largest magnitude becomes `largest`; infinite or NaN where anything is, and so is then what
// is read: 0 times it, or more.
STRATA_INLINE float scale_of(const float* x, float largest) {
  uint32_t top = 0;  // magnitudes of floats order like their bits
  for (int64_t i = 0; i < kBlock; ++i) top = std::max(top, std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFF);
  return std::bit_cast<float>(top) / largest;
}
// A block so small that its scale's reciprocal overflows becomes zeros; one of NaN, any codes.
STRATA_INLINE float factor_of(float scale) {
  const float factor = scale > 0 ? 1 / scale : 0;
  return factor <= std::numeric_limits<float>::max() ? factor : 0;
}

// x has kBlock numbers, zeros at its end where there are fewer; so have codes, 0 to 2 · kLargest.
template <int kLargest>
STRATA_INLINE float pack_linear(const float* x, const Noise& noise, uint32_t block, uint8_t* codes) {
  const float scale = scale_of(x, kLargest), factor = factor_of(scale);
  float random[kBlock];
  fill(noise, block, std::bit_cast<uint32_t>(scale), random);
  for (int64_t i = 0; i < kBlock; ++i) {
    // NaN becomes the least: the scale says what it was.
    const float value = std::min(float(kLargest), std::max(-float(kLargest), x[i] * factor)) + float(kLargest);
    codes[i] = uint8_t(std::min(int32_t(value + random[i]), 2 * kLargest));
  }
  return scale;
}
STRATA_SIMD float pack_int8(const float* x, const Noise& noise, uint32_t block, uint8_t* codes) {
  return pack_linear<127>(x, noise, block, codes);
}
STRATA_SIMD float pack_int4(const float* x, const Noise& noise, uint32_t block, uint8_t* codes) {
  uint8_t wide[kBlock];
  const float scale = pack_linear<7>(x, noise, block, wide);
  for (int64_t i = 0; i < kBlock / 2; ++i) codes[i] = uint8_t(wide[2 * i] | wide[2 * i + 1] << 4);
  return scale;
}
STRATA_SIMD float pack_e4m3(const float* x, const Noise&, uint32_t, uint8_t* codes) {
  const float scale = scale_of(x, 448), factor = factor_of(scale);
  for (int64_t i = 0; i < kBlock; ++i) codes[i] = uint8_t(gist::E4M3::encode(x[i] * factor));
  return scale;
}

STRATA_SIMD void add_int8(const uint8_t* codes, float scale, float* x) {
  for (int64_t i = 0; i < kBlock; ++i) x[i] += float(int32_t(codes[i]) - 127) * scale;
}
STRATA_SIMD void add_int4(const uint8_t* codes, float scale, float* x) {
  for (int64_t i = 0; i < kBlock / 2; ++i) {
    x[2 * i] += float(int32_t(codes[i] & 15) - 7) * scale;
    x[2 * i + 1] += float(int32_t(codes[i] >> 4) - 7) * scale;
  }
}
STRATA_SIMD void add_e4m3(const uint8_t* codes, float scale, float* x) {
  for (int64_t i = 0; i < kBlock; ++i) x[i] += gist::E4M3::decode(codes[i]) * scale;
}
STRATA_SIMD void add(const float* from, int64_t count, float* x) {
  for (int64_t i = 0; i < count; ++i) x[i] += from[i];
}

constexpr int64_t kGrain = 16;  // blocks worth a thread of their own

}  // namespace

int64_t packed_bytes(Format format, int64_t elements) {
  const int64_t bytes = code_bytes(format, elements) + (format == Format::bf16 ? 0 : 4 * blocks_of(elements));
  return (bytes + 63) / 64 * 64;
}

void pack(Threads& threads, Format format, DType dtype, const void* from, int64_t elements, const Noise& noise,
          std::byte* packed) {
  std::byte* const codes = codes_of(format, packed, elements);
  const auto encode = format == Format::int8 ? pack_int8 : format == Format::int4 ? pack_int4 : pack_e4m3;
  threads.split(blocks_of(elements), kGrain, [&](int64_t begin, int64_t end) {
    float x[kBlock];
    uint8_t whole[kBlock];
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock, count = std::min(kBlock, elements - first);
      if (format == Format::bf16) {
        convert(dtype, at(from, dtype, first), DType::bf16, codes + 2 * first, count);
        continue;
      }
      to_f32(dtype, at(from, dtype, first), x, count);
      std::fill(x + count, x + kBlock, 0.0f);
      const float scale = encode(x, noise, uint32_t(block), whole);
      std::memcpy(packed + 4 * block, &scale, 4);
      std::memcpy(codes + code_bytes(format, first), whole, size_t(code_bytes(format, count)));
    }
  });
  std::byte* const end = codes + code_bytes(format, elements);
  std::fill(end, packed + packed_bytes(format, elements), std::byte{0});
}

void unpack(Threads& threads, Format format, const std::byte* packed, int64_t sources, int64_t stride, int64_t elements,
            DType dtype, void* to) {
  const auto decode = format == Format::int8 ? add_int8 : format == Format::int4 ? add_int4 : add_e4m3;
  threads.split(blocks_of(elements), kGrain, [&](int64_t begin, int64_t end) {
    float sum[kBlock], wide[kBlock];
    uint8_t whole[kBlock] = {};
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock, count = std::min(kBlock, elements - first);
      std::fill(sum, sum + kBlock, 0.0f);
      for (int64_t source = 0; source < sources; ++source) {
        const std::byte* const list = packed + source * stride;
        const std::byte* const codes = codes_of(format, const_cast<std::byte*>(list), elements);
        if (format == Format::bf16) {
          to_f32(DType::bf16, codes + 2 * first, wide, count);
          add(wide, count, sum);
          continue;
        }
        float scale;
        std::memcpy(&scale, list + 4 * block, 4);
        std::memcpy(whole, codes + code_bytes(format, first), size_t(code_bytes(format, count)));
        decode(whole, scale, sum);
      }
      from_f32(dtype, sum, at(to, dtype, first), count);
    }
  });
}

}  // namespace strata::quantized
