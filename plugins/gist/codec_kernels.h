// Encoders and decoders on plain arrays of floats; what the bytes mean is said here and nowhere else.
// Results do not depend on the number of threads.
#pragma once
#include <cstdint>
#include <string>

#include "strata/op_kind.h"

namespace strata::gist {

inline constexpr int64_t kBlock = 256;        // elements that share one scale in the 8-bit formats
inline constexpr int64_t kChunk = 64 * 1024;  // elements whose nonzeros one thread packs in one go
inline int64_t blocks(int64_t count) { return (count + kBlock - 1) / kBlock; }
inline int64_t chunks(int64_t count) { return (count + kChunk - 1) / kChunk; }
inline int64_t bitmap_bytes(int64_t count) { return (count + 7) / 8; }

// Bit i%8 of byte i/8 is set where x[i] > 0. Decoding gives 1 where it is set and 0 elsewhere.
void encode_mask(Threads& threads, const float* x, int64_t count, uint8_t* mask);
void decode_mask(Threads& threads, const uint8_t* mask, int64_t count, float* x);

// Lossless: a bitmap of the elements whose bits are not those of +0, these elements one after the other, and where
// each chunk's begin in them (chunks + 1 numbers). Returns how many there are; when that is more than `capacity`,
// `values` is not written.
int64_t encode_sparse(Threads& threads, const float* x, int64_t count, uint8_t* bitmap, float* values, int64_t capacity,
                      int32_t* starts);
void decode_sparse(Threads& threads, const uint8_t* bitmap, const float* values, const int32_t* starts, int64_t count,
                   float* x);

// What is said when there are more of them than there is room for.
inline std::string too_many(const OpView& v, int64_t found) {
  return v.input(0).name + " has " + std::to_string(found) + " nonzero elements of " +
         std::to_string(elements(v.input(0).shape)) + ", but plugins.gist.capacity has room for " +
         std::to_string(elements(v.output(1).shape)) + "; raise it and resume from the last checkpoint.";
}

// bfloat16, round to nearest even: relative error at most 2^-8 of a normal number; NaN stays NaN.
void encode_bf16(Threads& threads, const float* x, int64_t count, uint16_t* codes);
void decode_bf16(Threads& threads, const uint16_t* codes, int64_t count, float* x);

// Eight bits an element and one float a block. e4m3 and e5m2 are the formats of "OCP 8-bit Floating Point
// Specification" 1.0, e4m3 without infinities; a block is scaled so that its largest magnitude becomes the format's
// (448, 57344). int8 is linear: round(127 x / largest) + 128. Round to nearest even throughout.
enum class Format { e4m3, e5m2, int8 };
void encode_8bit(Threads& threads, Format format, const float* x, int64_t count, uint8_t* codes, float* scales);
void decode_8bit(Threads& threads, Format format, const uint8_t* codes, const float* scales, int64_t count, float* x);

// The value of one code before scaling.
float value_of(Format format, uint8_t code);

}  // namespace strata::gist
