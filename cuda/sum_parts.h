// The end of sums over many rows that blocks have added up apart: their parts, always in the same order.
#pragma once
#include "cuda/bind.h"

namespace strata::cuda {

// Of a block: neighbours read together, lanes share the parts. 264 parts are 9 reads of a lane, four at once: a few
// blocks wait for memory rather than for how much of it they read.
inline constexpr int kPartColumns = 32, kPartLanes = 32;

// to.out[k][i] = Σ_p parts[p * stride + k * columns + i] with k = blockIdx.y, added to what is there when to.onto[k].
struct PartSums {
  float* out[2];
  bool onto[2];
};
static STRATA_KERNEL __launch_bounds__(kPartColumns* kPartLanes)
    sum_parts(const float* parts, int count, int64_t stride, PartSums to, int64_t columns) {
  __shared__ float sums[kPartColumns * kPartLanes];
  const int column = int(threadIdx.x) % kPartColumns, lane = int(threadIdx.x) / kPartColumns;
  const int64_t i = int64_t(blockIdx.x) * kPartColumns + column;
  float* const out = to.out[blockIdx.y];
  parts += blockIdx.y * columns;
  float sum = 0;
#pragma unroll 8
  for (int p = lane; p < count && i < columns; p += kPartLanes) sum += parts[p * stride + i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (lane != 0 || i >= columns) return;
  sum = to.onto[blockIdx.y] ? out[i] : 0.0f;
  for (int l = 0; l < kPartLanes; ++l) sum += sums[l * kPartColumns + column];
  out[i] = sum;
}

inline void launch_sum_parts(const float* parts, int count, int64_t columns, float* out, bool onto, void* queue) {
  launch(sum_parts, dim3(blocks(columns, kPartColumns)), kPartColumns * kPartLanes, 0, queue, parts, count, columns,
         PartSums{{out}, {onto}}, columns);
}
// Of parts with two sums each; the second is not wanted where its place is null.
inline void launch_sum_parts(const float* parts, int count, int64_t columns, const PartSums& to, void* queue) {
  launch(sum_parts, dim3(blocks(columns, kPartColumns), to.out[1] ? 2 : 1), kPartColumns * kPartLanes, 0, queue, parts,
         count, 2 * columns, to, columns);
}

}  // namespace strata::cuda
