// Numbers of 16 bits and f32, both ways, many at a time; and loops over f32 for operands stored as any of them.
// bf16: the upper half of an f32. f16: IEEE 754 binary16.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>

#include "strata/op_kind.h"

namespace strata {

inline bool is_half(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16; }

// `count` numbers of f32, bf16 or f16 at `from`, exactly.
void to_f32(DType dtype, const void* from, float* to, int64_t count);
// Rounds to nearest, ties to even; what is too large becomes infinite, NaN stays NaN.
void from_f32(DType dtype, const float* from, void* to, int64_t count);
// Between any two of f32, bf16 and f16.
void convert(DType source, const void* from, DType target, void* to, int64_t count);
// Rounds f32 to bf16 up or down with the probability that keeps the expectation (Gupta et al., arXiv 1502.02551):
// number i takes the Philox words keyed by seed and stream of the global index first + i.
void to_bf16_stochastically(const float* from, uint16_t* to, int64_t count, uint64_t seed, uint64_t stream,
                            int64_t first);

inline void* at(void* data, DType dtype, int64_t index) { return static_cast<char*>(data) + index * size_of(dtype); }
inline const void* at(const void* data, DType dtype, int64_t index) {
  return static_cast<const char*>(data) + index * size_of(dtype);
}

// Calls body(in, out, count, begin) over elements [begin, end) of the first kIn inputs and kOut outputs, all of one
// number of elements: pointers to f32, to the tensors themselves where all are f32 (then once), else to chunks of them
// that stay in the first cache. Outputs that accumulate, and those updated in place, are read before.
template <int kIn, int kOut, class Body>
void over_f32(const Binding& b, int64_t begin, int64_t end, Body&& body) {
  constexpr int64_t kChunk = 1024;
  std::array<const float*, kIn> in;
  std::array<float*, kOut> out;
  bool direct = true;
  for (int i = 0; i < kIn; ++i) {
    direct &= b.input(i).dtype == DType::f32;
    in[i] = b.in<float>(i) + (direct ? begin : 0);
  }
  for (int o = 0; o < kOut; ++o) {
    direct &= b.output(o).dtype == DType::f32;
    out[o] = b.out<float>(o) + (direct ? begin : 0);
  }
  if (direct) return body(in, out, end - begin, begin);
  alignas(64) float buffers[kIn + kOut][kChunk];
  for (int64_t i = begin; i < end; i += kChunk) {
    const int64_t count = std::min(kChunk, end - i);
    for (int k = 0; k < kIn; ++k) {
      to_f32(b.input(k).dtype, at(b.in<void>(k), b.input(k).dtype, i), buffers[k], count);
      in[k] = buffers[k];
    }
    for (int k = 0; k < kOut; ++k) {
      out[k] = buffers[kIn + k];
      if (b.accumulates(k)) to_f32(b.output(k).dtype, at(b.out<void>(k), b.output(k).dtype, i), out[k], count);
    }
    body(in, out, count, i);
    for (int k = 0; k < kOut; ++k) from_f32(b.output(k).dtype, out[k], at(b.out<void>(k), b.output(k).dtype, i), count);
  }
}

}  // namespace strata
