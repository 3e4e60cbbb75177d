// The arithmetic of Deep Gradient Compression (Lin et al., arXiv 1712.01887, algorithm 4 without clipping) on one rank:
// what is accumulated, which elements are sent, and the sum of what ranks sent.
#pragma once
#include <cstddef>
#include <cstdint>

#include "strata/tensor.h"
#include "strata/threads.h"

namespace strata::top_k {

// Of so many elements, those that are sent: at least one.
int64_t kept(int64_t elements, double sparsity);
// A list is k indices of 32 bits in rising order, then k values of the gradient's type. Of a tensor of fewer than k
// elements the last indices are kNone.
inline constexpr uint32_t kNone = UINT32_MAX;
int64_t list_bytes(int64_t k, DType dtype);
int64_t workspace_bytes(int64_t elements, int threads);

// velocity = momentum · velocity + gradient, accumulated += velocity; the k elements of accumulated of largest size
// (NaN before all, the first of equals first) go to the list and out of both. Without a velocity (null) the gradient is
// added. What the rounding to the gradient's type leaves of a value stays in accumulated. The same bits for any number
// of threads.
void take(Threads& threads, DType dtype, const void* gradient, int64_t count, int64_t k, float momentum,
          float* velocity, float* accumulated, void* workspace, std::byte* list);
void take_nothing(int64_t k, DType dtype, std::byte* list);
// Elements [first, first + count) of the sum of lists, one of each rank, `bytes` long, added in the order of ranks in
// f32.
void add_up(Threads& threads, DType dtype, const std::byte* lists, int64_t ranks, int64_t bytes, int64_t k,
            int64_t first, int64_t count, void* result);

}  // namespace strata::top_k
