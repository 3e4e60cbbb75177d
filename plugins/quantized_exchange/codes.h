// Gradients as codes of few bits on one rank: how numbers are packed, in blocks with a scale each, and read again. What
// goes to which rank is the exchange's matter. The formats and the error of each are in README.md.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "strata/error.h"
#include "strata/tensor.h"
#include "strata/threads.h"

namespace strata::quantized {

// bf16 rounds to nearest. The others are scaled so that a block's largest magnitude becomes the format's largest: int8
// (127) and int4 (7) are rounded up or down with the probability that keeps the expectation (Gupta et al., arXiv
// 1502.02551), fp8_e4m3 (448, OCP 8-bit Floating Point Specification 1.0) to nearest.
enum class Format { int8, int4, fp8_e4m3, bf16 };
inline Format format_of(std::string_view wanted) {
  constexpr std::pair<const char*, Format> kFormats[] = {
      {"int8", Format::int8}, {"int4", Format::int4}, {"fp8_e4m3", Format::fp8_e4m3}, {"bf16", Format::bf16}};
  for (const auto& [name, format] : kFormats)
    if (wanted == name) return format;
  throw Error("there is no format \"" + std::string(wanted) + "\".", ExitCode::failed);
}

constexpr int64_t kBlock = 256;  // elements with a scale in common; the last block of a list may be shorter

// Bytes that `elements` numbers are packed into: scales (f32), then codes; a multiple of 64.
inline int64_t packed_bytes(Format format, int64_t elements) {
  const int64_t scales = format == Format::bf16 ? 0 : 4 * ((elements + kBlock - 1) / kBlock),
                codes = format == Format::int4   ? (elements + 1) / 2
                        : format == Format::bf16 ? 2 * elements
                                                 : elements;
  return (scales + codes + 63) / 64 * 64;
}

// Random numbers for one list: words of Philox (strata/random.h) with key (seed, stream) and the step for a counter,
// from which a hash makes those of each element by its block, the block's scale and its place in the block
// (rounding.h). So what is rounded again in the same step, of another microbatch or on another rank, is rounded
// independently of it.
struct Noise {
  uint32_t seed = 0, stream = 0, step = 0;
};

// Of a block that holds NaN or an infinity nothing is finite when it is read: an overflow is seen. Without noise
// everything is rounded to nearest, so the same numbers have the same codes in every step.
void pack(Threads& threads, Format format, DType dtype, const void* from, int64_t elements, const Noise* noise,
          std::byte* packed);
inline void pack(Threads& threads, Format format, DType dtype, const void* from, int64_t elements, const Noise& noise,
                 std::byte* packed) {
  pack(threads, format, dtype, from, elements, &noise, packed);
}
// Reads `sources` lists, `stride` bytes apart, and adds them up in their order, in f32; rounded once to `dtype`.
void unpack(Threads& threads, Format format, const std::byte* packed, int64_t sources, int64_t stride, int64_t elements,
            DType dtype, void* to);

}  // namespace strata::quantized
