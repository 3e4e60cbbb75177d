// The loops over blocks: each reads its numbers once and writes its codes once. See codes.h.
#include "plugins/quantized_exchange/codes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "plugins/gist/codec_formats.h"  // the code of e4m3
#include "plugins/quantized_exchange/rounding.h"
#include "plugins/quantized_exchange/streaming.h"
#include "strata/convert.h"
#include "strata/random.h"

namespace strata::quantized {
namespace {

constexpr int64_t kHalf = kBlock / 2;

int64_t blocks_of(int64_t elements) { return (elements + kBlock - 1) / kBlock; }
int64_t code_bytes(Format format, int64_t elements) {
  return format == Format::int4 ? (elements + 1) / 2 : format == Format::bf16 ? 2 * elements : elements;
}
std::byte* codes_of(Format format, std::byte* packed, int64_t elements) {
  return packed + (format == Format::bf16 ? 0 : 4 * blocks_of(elements));
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

// What is known of a block before its codes are made.
struct Before {
  float scale, factor;
  Keys keys;
};
constexpr int64_t kTogether = 16;  // blocks whose scales are found one after the other, so that none is waited for

// x has kBlock numbers, zeros at its end where there are fewer; codes are 0 to 2 · kLargest, without noise to nearest.
// They are each in a byte, or two in one: those of elements l and kHalf + l.
template <int kLargest, bool kNoise, bool kTwo>
STRATA_INLINE void pack_linear(const float* x, const Before& of, uint8_t* codes) {
  const float factor = of.factor;
  const Keys keys = of.keys;
  uint8_t low[kHalf], high[kHalf];  // which nothing else is, as the compiler knows
  for (uint32_t l = 0; l < kHalf; ++l) {
    const uint32_t word = kNoise ? keys.word(l) : kToNearest << 16 | kToNearest;
    const uint32_t first = code_of<kLargest>(x[l] * factor, word & 0xFFFF),
                   second = code_of<kLargest>(x[kHalf + l] * factor, word >> 16);
    low[l] = uint8_t(kTwo ? first | second << 4 : first);
    if (!kTwo) high[l] = uint8_t(second);
  }
  std::memcpy(codes, low, kHalf);
  if (!kTwo) std::memcpy(codes + kHalf, high, kHalf);
}
STRATA_SIMD void pack_int8(const float* x, const Before& of, uint8_t* codes) {
  pack_linear<127, true, false>(x, of, codes);
}
STRATA_SIMD void pack_int8_to_nearest(const float* x, const Before& of, uint8_t* codes) {
  pack_linear<127, false, false>(x, of, codes);
}
STRATA_SIMD void pack_int4(const float* x, const Before& of, uint8_t* codes) {
  pack_linear<7, true, true>(x, of, codes);
}
STRATA_SIMD void pack_int4_to_nearest(const float* x, const Before& of, uint8_t* codes) {
  pack_linear<7, false, true>(x, of, codes);
}
STRATA_SIMD void pack_e4m3(const float* x, const Before& of, uint8_t* codes) {
  const float factor = of.factor;
  uint8_t made[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) made[i] = uint8_t(gist::E4M3::encode(x[i] * factor));
  std::memcpy(codes, made, kBlock);
}
// Of `count` whole blocks from number `block` on.
STRATA_SIMD void look_at(const float* x, int64_t count, float largest, uint32_t block, const Keys& keys, Before* of) {
  for (int64_t b = 0; b < count; ++b) of[b].scale = scale_of(x + b * kBlock, largest);
  for (int64_t b = 0; b < count; ++b) {
    of[b].factor = factor_of(of[b].scale);
    of[b].keys = keys.of_block(block + uint32_t(b), std::bit_cast<uint32_t>(of[b].scale));
  }
}

// What E4M3::decode gives: an f32's exponent has 120 more than e4m3's, below the smallest normal number, too.
STRATA_INLINE float value_of_e4m3(uint8_t code) {
  const uint32_t magnitude = code & 0x7F, sign = uint32_t(code >> 7) << 31;
  return std::bit_cast<float>(magnitude << 20 | sign) * 0x1p120f;
}

// The numbers of a block, or those added to what is there.
STRATA_SIMD void read_int8(const uint8_t* codes, float scale, float* x) {
  for (int64_t i = 0; i < kBlock; ++i) x[i] = float(int32_t(codes[i]) - 127) * scale;
}
STRATA_SIMD void add_int8(const uint8_t* codes, float scale, float* x) {
  for (int64_t i = 0; i < kBlock; ++i) x[i] += float(int32_t(codes[i]) - 127) * scale;
}
STRATA_SIMD void read_int4(const uint8_t* codes, float scale, float* x) {
  for (int64_t i = 0; i < kHalf; ++i) x[i] = float(int32_t(codes[i] & 15) - 7) * scale;
  for (int64_t i = 0; i < kHalf; ++i) x[kHalf + i] = float(int32_t(codes[i] >> 4) - 7) * scale;
}
STRATA_SIMD void add_int4(const uint8_t* codes, float scale, float* x) {
  for (int64_t i = 0; i < kHalf; ++i) x[i] += float(int32_t(codes[i] & 15) - 7) * scale;
  for (int64_t i = 0; i < kHalf; ++i) x[kHalf + i] += float(int32_t(codes[i] >> 4) - 7) * scale;
}
STRATA_SIMD void read_e4m3(const uint8_t* codes, float scale, float* x) {
  for (int64_t i = 0; i < kBlock; ++i) x[i] = value_of_e4m3(codes[i]) * scale;
}
STRATA_SIMD void add_e4m3(const uint8_t* codes, float scale, float* x) {
  for (int64_t i = 0; i < kBlock; ++i) x[i] += value_of_e4m3(codes[i]) * scale;
}
struct Loops {
  void (*pack)(const float*, const Before&, uint8_t* codes);
  void (*read)(const uint8_t* codes, float scale, float*);
  void (*add)(const uint8_t* codes, float scale, float*);
  float largest;
};
Loops loops_of(Format format, bool noise = false) {
  if (format == Format::int8) return {noise ? pack_int8 : pack_int8_to_nearest, read_int8, add_int8, 127};
  if (format == Format::int4) return {noise ? pack_int4 : pack_int4_to_nearest, read_int4, add_int4, 7};
  return {pack_e4m3, read_e4m3, add_e4m3, 448};
}

// The bytes of a whole block from and to those of one of fewer elements: of int4 half of these are in the lower bits.
void shorten(Format format, int64_t count, const uint8_t* whole, uint8_t* codes) {
  if (format != Format::int4) return void(std::memcpy(codes, whole, size_t(count)));
  const auto code = [&](int64_t i) { return i < kHalf ? whole[i] & 15 : whole[i - kHalf] >> 4; };
  const int64_t half = (count + 1) / 2;
  for (int64_t i = 0; i < half; ++i) codes[i] = uint8_t(code(i) | (half + i < count ? code(half + i) << 4 : 0));
}
void lengthen(Format format, int64_t count, const uint8_t* codes, uint8_t* whole) {
  if (format != Format::int4) return void(std::memcpy(whole, codes, size_t(count)));
  const int64_t half = (count + 1) / 2;
  std::fill(whole, whole + kHalf, uint8_t{0});
  for (int64_t i = 0; i < count; ++i) {
    const int code = i < half ? codes[i] & 15 : codes[i - half] >> 4;
    whole[i % kHalf] = uint8_t(whole[i % kHalf] | (i < kHalf ? code : code << 4));
  }
}

STRATA_SIMD void add(const float* from, int64_t count, float* x) {
  for (int64_t i = 0; i < count; ++i) x[i] += from[i];
}

constexpr int64_t kGrain = 16;  // blocks worth a thread of their own

}  // namespace

void pack(Threads& threads, Format format, DType dtype, const void* from, int64_t elements, const Noise* noise,
          std::byte* packed) {
  auto* const codes = reinterpret_cast<uint8_t*>(codes_of(format, packed, elements));
  const Loops loops = loops_of(format, noise);
  Keys keys;
  if (noise) {
    const auto words = philox({0, 0, noise->step, 0}, noise->seed, noise->stream);
    keys = {words[0], words[1]};
  }
  threads.split(blocks_of(elements), kGrain, [&](int64_t begin, int64_t end) {
    float converted[kTogether * kBlock];
    uint8_t whole[kBlock];
    Before of[kTogether];
    for (int64_t block = begin; block < end; block += kTogether) {
      const int64_t blocks = std::min(kTogether, end - block), first = block * kBlock,
                    count = std::min(blocks * kBlock, elements - first);
      const void* const source = at(from, dtype, first);
      if (format == Format::bf16) {
        convert(dtype, source, DType::bf16, codes + code_bytes(format, first), count);
        continue;
      }
      const float* x = static_cast<const float*>(source);
      if (count < blocks * kBlock || dtype != DType::f32) {
        to_f32(dtype, source, converted, count);
        std::fill(converted + count, converted + blocks * kBlock, 0.0f);
        x = converted;
      }
      look_at(x, blocks, loops.largest, uint32_t(block), keys, of);
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t own = std::min(kBlock, count - b * kBlock);
        uint8_t* const to = codes + code_bytes(format, first + b * kBlock);
        loops.pack(x + b * kBlock, of[b], own < kBlock ? whole : to);
        if (own < kBlock) shorten(format, own, whole, to);
        std::memcpy(packed + 4 * (block + b), &of[b].scale, 4);
      }
    }
  });
  std::fill(codes + code_bytes(format, elements), reinterpret_cast<uint8_t*>(packed) + packed_bytes(format, elements),
            uint8_t{0});
}

void unpack(Threads& threads, Format format, const std::byte* packed, int64_t sources, int64_t stride, int64_t elements,
            DType dtype, void* to) {
  const Loops loops = loops_of(format);
  const bool past = dtype == DType::f32 && 4 * elements >= kPastCaches;
  threads.split(blocks_of(elements), kGrain, [&](int64_t begin, int64_t end) {
    float own[kBlock], wide[kBlock];
    uint8_t whole[kBlock] = {};
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock, count = std::min(kBlock, elements - first);
      void* const target = at(to, dtype, first);
      const bool in_place = count == kBlock && dtype == DType::f32 && !past;
      float* const sum = in_place ? static_cast<float*>(target) : own;
      for (int64_t source = 0; source < sources; ++source) {
        const std::byte* const list = packed + source * stride;
        const auto* codes = reinterpret_cast<const uint8_t*>(codes_of(format, const_cast<std::byte*>(list), elements)) +
                            code_bytes(format, first);
        if (format == Format::bf16) {
          to_f32(DType::bf16, codes, source == 0 ? sum : wide, count);
          if (source > 0) add(wide, count, sum);
          continue;
        }
        float scale;
        std::memcpy(&scale, list + 4 * block, 4);
        if (count < kBlock) {
          lengthen(format, count, codes, whole);
          codes = whole;
        }
        (source == 0 ? loops.read : loops.add)(codes, scale, sum);
      }
      if (past)
        store_past_caches(static_cast<float*>(target), own, count);
      else if (!in_place)
        from_f32(dtype, own, target, count);
    }
    if (past) drain_stores();
  });
}

}  // namespace strata::quantized
