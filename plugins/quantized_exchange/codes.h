// Gradients as codes of few bits on one rank: how numbers are packed, in blocks with a scale each, and read again. What
// goes to which rank is the exchange's matter. The formats and the error of each are in README.md.
#pragma once
#include <cstdint>

#include "strata/tensor.h"
#include "strata/threads.h"

namespace strata::quantized {

// bf16 rounds to nearest. The others are scaled so that a block's largest magnitude becomes the format's largest: int8
// (127) and int4 (7) are rounded up or down with the probability that keeps the expectation (Gupta et al., arXiv
// 1502.02551), fp8_e4m3 (448, OCP 8-bit Floating Point Specification 1.0) to nearest.
enum class Format { int8, int4, fp8_e4m3, bf16 };

constexpr int64_t kBlock = 256;  // elements with a scale in common; the last block of a list may be shorter

// Bytes that `elements` numbers are packed into: scales (f32), then codes; a multiple of 64.
int64_t packed_bytes(Format format, int64_t elements);

// Random numbers for one list: Philox (strata/random.h) with key (seed, stream) and counter (block of eight elements,
// step, bits of the block's scale), so that what is rounded again in the same step, of another microbatch or on another
// rank, is rounded independently of it.
struct Noise {
  uint32_t seed = 0, stream = 0, step = 0;
};

// Of a block that holds NaN or an infinity nothing is finite when it is read: an overflow is seen.
void pack(Threads& threads, Format format, DType dtype, const void* from, int64_t elements, const Noise& noise,
          std::byte* packed);
// Reads `sources` lists, `stride` bytes apart, and adds them up in their order, in f32; rounded once to `dtype`.
void unpack(Threads& threads, Format format, const std::byte* packed, int64_t sources, int64_t stride, int64_t elements,
            DType dtype, void* to);

}  // namespace strata::quantized
