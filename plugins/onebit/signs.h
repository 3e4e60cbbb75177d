// Gradients as one bit an element on one rank: how numbers are packed, in blocks with two values each, what that leaves
// out, and how they are read again. What goes to which rank is the exchange's matter (onebit.cpp).
#pragma once
#include <cstdint>

#include "strata/tensor.h"
#include "strata/threads.h"

namespace strata::onebit {

constexpr int64_t kBlock = 512;  // elements with two values in common; the last block of a list may be shorter

// Bytes of a list of `elements` numbers: for each block the values (f32) that stand for what has no sign and for what
// has one, then a bit an element, also behind the last.
int64_t list_bytes(int64_t elements);

// 1-bit SGD (Seide et al., Interspeech 2014, section 3): x = from + error; each element becomes the mean of those of
// its block that have its sign, and error what that leaves out. `error`: f32, as many elements as `from`. Of a block
// that holds NaN or an infinity nothing is finite when it is read, and its error is 0. The same for any number of
// threads.
void pack(Threads& threads, DType dtype, const void* from, int64_t elements, float* error, std::byte* list);

// Reads `sources` lists, `stride` bytes apart, and adds them up in their order, in f32; rounded once to `dtype`.
void unpack(Threads& threads, const std::byte* lists, int64_t sources, int64_t stride, int64_t elements, DType dtype,
            void* to);

}  // namespace strata::onebit
