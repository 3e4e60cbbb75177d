// The loops behind the encodings; see codec_kernels.h.
#include "plugins/gist/codec_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "plugins/gist/codec_formats.h"
#include "strata/convert.h"
#include "strata/simd.h"

namespace strata::gist {
namespace {

// Packs 64 conditions a time; `x` has `count` elements, and the bytes of the last, partial group are written whole.
template <class Condition>
STRATA_INLINE void pack_bits(const float* x, int64_t count, uint8_t* bitmap, Condition condition) {
  for (int64_t i = 0; i < count; i += 8) {
    const int64_t n = std::min<int64_t>(8, count - i);
    uint8_t byte = 0;
    for (int64_t b = 0; b < n; ++b) byte |= uint8_t(condition(x[i + b]) << b);
    bitmap[i / 8] = byte;
  }
}

STRATA_SIMD void mask_range(const float* x, int64_t count, uint8_t* mask) {
  pack_bits(x, count, mask, [](float v) { return v > 0; });
}
STRATA_SIMD void nonzero_range(const float* x, int64_t count, uint8_t* bitmap) {
  pack_bits(x, count, bitmap, [](float v) { return bits_of(v) != 0; });
}

template <class Code>
STRATA_INLINE void encode_block(const float* x, int64_t count, float largest, uint8_t* codes, float* scale) {
  uint32_t top = 0;  // magnitudes of floats order like their bits
  for (int64_t i = 0; i < count; ++i) top = std::max(top, bits_of(x[i]) & 0x7FFFFFFF);
  *scale = std::bit_cast<float>(top) / largest;
  const float factor = *scale > 0 ? 1 / *scale : 0;
  // A block so small that its scale's reciprocal overflows is kept as zeros.
  const float finite = std::isfinite(factor) ? factor : 0;
  for (int64_t i = 0; i < count; ++i) codes[i] = uint8_t(Code::encode(x[i] * finite));
}
STRATA_SIMD void encode_e4m3(const float* x, int64_t count, uint8_t* codes, float* scale) {
  encode_block<E4M3>(x, count, 448, codes, scale);
}
STRATA_SIMD void encode_e5m2(const float* x, int64_t count, uint8_t* codes, float* scale) {
  encode_block<E5M2>(x, count, 57344, codes, scale);
}
STRATA_SIMD void encode_int8(const float* x, int64_t count, uint8_t* codes, float* scale) {
  encode_block<Int8>(x, count, 127, codes, scale);
}
STRATA_SIMD void decode_e4m3(const uint8_t* codes, int64_t count, float scale, float* x) {
  for (int64_t i = 0; i < count; ++i) x[i] = E4M3::decode(codes[i]) * scale;
}
STRATA_SIMD void decode_e5m2(const uint8_t* codes, int64_t count, float scale, float* x) {
  for (int64_t i = 0; i < count; ++i) x[i] = E5M2::decode(codes[i]) * scale;
}
STRATA_SIMD void decode_int8(const uint8_t* codes, int64_t count, float scale, float* x) {
  for (int64_t i = 0; i < count; ++i) x[i] = Int8::decode(codes[i]) * scale;
}

// A chunk's nonzeros, 64 elements a time through a buffer so that no branch depends on the data.
void pack_chunk(const float* x, int64_t count, float* values) {
  float group[64];
  for (int64_t i = 0; i < count; i += 64) {
    const int64_t n = std::min<int64_t>(64, count - i);
    int64_t kept = 0;
    for (int64_t j = 0; j < n; ++j) {
      group[kept] = x[i + j];
      kept += bits_of(x[i + j]) != 0;
    }
    std::memcpy(values, group, size_t(kept) * sizeof(float));
    values += kept;
  }
}
void unpack_chunk(const uint8_t* bitmap, const float* values, int64_t count, float* x) {
  for (int64_t i = 0; i < count; i += 8) {
    const int64_t n = std::min<int64_t>(8, count - i);
    for (int64_t b = 0; b < n; ++b) {
      const bool set = bitmap[i / 8] >> b & 1;
      x[i + b] = set ? *values : 0.0f;
      values += set;
    }
  }
}

constexpr int64_t kGrain = 4096;  // elements worth handing to another thread; a multiple of 8 and of kBlock

}  // namespace

void encode_mask(Threads& threads, const float* x, int64_t count, uint8_t* mask) {
  threads.split(count, kGrain, [&](int64_t i, int64_t e) { mask_range(x + i, e - i, mask + i / 8); });
}
void decode_mask(Threads& threads, const uint8_t* mask, int64_t count, float* x) {
  threads.split(count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) x[i] = float(mask[i / 8] >> (i % 8) & 1);
  });
}

int64_t encode_sparse(Threads& threads, const float* x, int64_t count, uint8_t* bitmap, float* values, int64_t capacity,
                      int32_t* starts) {
  const int64_t parts = chunks(count);
  threads.split(parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      const int64_t begin = c * kChunk, size = std::min(kChunk, count - begin);
      nonzero_range(x + begin, size, bitmap + begin / 8);
      int64_t set = 0;
      for (int64_t byte = 0; byte < bitmap_bytes(size); ++byte) set += std::popcount(bitmap[begin / 8 + byte]);
      starts[c + 1] = int32_t(set);
    }
  });
  starts[0] = 0;
  for (int64_t c = 0; c < parts; ++c) starts[c + 1] += starts[c];
  if (starts[parts] > capacity) return starts[parts];
  threads.split(parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c)
      pack_chunk(x + c * kChunk, std::min(kChunk, count - c * kChunk), values + starts[c]);
  });
  return starts[parts];
}
void decode_sparse(Threads& threads, const uint8_t* bitmap, const float* values, const int32_t* starts, int64_t count,
                   float* x) {
  threads.split(chunks(count), 1, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c)
      unpack_chunk(bitmap + c * kChunk / 8, values + starts[c], std::min(kChunk, count - c * kChunk), x + c * kChunk);
  });
}

void encode_bf16(Threads& threads, const float* x, int64_t count, uint16_t* codes) {
  threads.split(count, kGrain, [&](int64_t i, int64_t e) { from_f32(DType::bf16, x + i, codes + i, e - i); });
}
void decode_bf16(Threads& threads, const uint16_t* codes, int64_t count, float* x) {
  threads.split(count, kGrain, [&](int64_t i, int64_t e) { to_f32(DType::bf16, codes + i, x + i, e - i); });
}

void encode_8bit(Threads& threads, Format format, const float* x, int64_t count, uint8_t* codes, float* scales) {
  const auto encode = format == Format::e4m3 ? encode_e4m3 : format == Format::e5m2 ? encode_e5m2 : encode_int8;
  threads.split(count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kBlock)
      encode(x + i, std::min(kBlock, end - i), codes + i, scales + i / kBlock);
  });
}
void decode_8bit(Threads& threads, Format format, const uint8_t* codes, const float* scales, int64_t count, float* x) {
  const auto decode = format == Format::e4m3 ? decode_e4m3 : format == Format::e5m2 ? decode_e5m2 : decode_int8;
  threads.split(count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kBlock)
      decode(codes + i, std::min(kBlock, end - i), scales[i / kBlock], x + i);
  });
}

float value_of(Format format, uint8_t code) {
  return format == Format::e4m3 ? E4M3::decode(code) : format == Format::e5m2 ? E5M2::decode(code) : Int8::decode(code);
}

}  // namespace strata::gist
