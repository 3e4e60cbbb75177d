// The end of sums over many rows that blocks have added up apart: their parts, always in the same order.
#pragma once
#include "cuda/bind.h"

namespace strata::cuda {

// Of a block: neighbours read together, lanes share the parts. 264 parts are 9 reads of a lane, four at once: a few
// blocks wait for memory rather than for how much of it they read.
inline constexpr int kPartColumns = 32, kPartLanes = 32;

// out[i] = Σ_p parts[p * stride + i], added to what is there when `accumulate`.
static STRATA_KERNEL __launch_bounds__(kPartColumns* kPartLanes)
    sum_parts(const float* parts, int count, int64_t stride, float* out, int64_t columns, bool accumulate) {
  __shared__ float sums[kPartColumns * kPartLanes];
  const int column = int(threadIdx.x) % kPartColumns, lane = int(threadIdx.x) / kPartColumns;
  const int64_t i = int64_t(blockIdx.x) * kPartColumns + column;
  float sum = 0;
#pragma unroll 4
  for (int p = lane; p < count && i < columns; p += kPartLanes) sum += parts[p * stride + i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (lane != 0 || i >= columns) return;
  sum = accumulate ? out[i] : 0.0f;
  for (int l = 0; l < kPartLanes; ++l) sum += sums[l * kPartColumns + column];
  out[i] = sum;
}

inline void launch_sum_parts(const float* parts, int count, int64_t stride, float* out, int64_t columns,
                             bool accumulate, void* queue) {
  launch(sum_parts, dim3(blocks(columns, kPartColumns)), kPartColumns * kPartLanes, 0, queue, parts, count, stride, out,
         columns, accumulate);
}

}  // namespace strata::cuda
