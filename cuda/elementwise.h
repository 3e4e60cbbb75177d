// Elementwise kernels from a function of one element: each thread takes eight, in accesses of 16 bytes, computed in
// f32.
#pragma once
#include "cuda/bind.h"

namespace strata::cuda {

inline constexpr int kElements = 8, kElementBlock = 256;  // a thread's elements, a block's threads

template <class T, int kCount>
struct Operands {
  T* data[kCount];
};

// function(in, out, index) computes element `index` of every output from that of every input.
template <class T, int kIn, int kOut, class Function>
STRATA_KERNEL apply(Operands<const T, kIn> in, Operands<T, kOut> out, int64_t count, Function function) {
  const int64_t first = (int64_t(blockIdx.x) * kElementBlock + threadIdx.x) * kElements;
  if (first >= count) return;
  float x[kIn][kElements], y[kOut][kElements];
#pragma unroll
  for (int k = 0; k < kIn; ++k) load(in.data[k], first, count, x[k]);
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    float one[kIn], result[kOut];
#pragma unroll
    for (int k = 0; k < kIn; ++k) one[k] = x[k][e];
    function(one, result, first + e);
#pragma unroll
    for (int k = 0; k < kOut; ++k) y[k][e] = result[k];
  }
#pragma unroll
  for (int k = 0; k < kOut; ++k) store(out.data[k], first, count, y[k]);
}

// The first kIn inputs and kOut outputs, all of one type and size.
template <int kIn, int kOut, class Function>
Launch bind_apply(const Binding& b, Function function) {
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    Operands<const T, kIn> in;
    Operands<T, kOut> out;
    for (int k = 0; k < kIn; ++k) in.data[k] = b.in<T>(k);
    for (int k = 0; k < kOut; ++k) out.data[k] = b.out<T>(k);
    return [=, n = count(b.input(0)), queue = b.queue()] {
      launch(apply<T, kIn, kOut, Function>, dim3(blocks(n, kElements * kElementBlock)), kElementBlock, 0, queue, in,
             out, n, function);
    };
  });
}

}  // namespace strata::cuda
