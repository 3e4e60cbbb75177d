// cast: f32, bf16 and f16 into each other, added to what is there where the op accumulates.
#include "cuda/bind.h"

namespace strata::cuda::cast_kernels {
namespace {

constexpr int kEach = 8, kBlock = 256;

template <class From, class To, bool kAccumulate>
STRATA_KERNEL cast(const From* from, To* to, int64_t count) {
  const int64_t first = (int64_t(blockIdx.x) * kBlock + threadIdx.x) * kEach;
  if (first >= count) return;
  float x[kEach];
  load(from, first, count, x);
  if (kAccumulate) {
    float sum[kEach];
    load(static_cast<const To*>(to), first, count, sum);
#pragma unroll
    for (int e = 0; e < kEach; ++e) x[e] += sum[e];
  }
  store(to, first, count, x);
}

const Registration kind("cast", [](const Binding& b) -> Launch {
  return with_type(b.input(0).dtype, [&](auto from) -> Launch {
    return with_type(b.output(0).dtype, [&](auto to) -> Launch {
      using From = decltype(from);
      using To = decltype(to);
      const auto kernel = b.accumulates(0) ? cast<From, To, true> : cast<From, To, false>;
      return [=, x = b.in<From>(0), y = b.out<To>(0), n = count(b.input(0)), queue = b.queue()] {
        launch(kernel, dim3(blocks(n, kEach * kBlock)), kBlock, 0, queue, x, y, n);
      };
    });
  });
});

}  // namespace
}  // namespace strata::cuda::cast_kernels
