// What attention's kernels without tensor cores have in common: tiles of rows in shared memory, of which a warp takes
// one row at a time (attention.cu, context_attention.cu).
#pragma once
#include <type_traits>

#include "cuda/kernels/attention.h"

namespace strata::cuda::attention_kernels {

constexpr int kWarps = 8, kBlock = 32 * kWarps, kTile = 32, kMostDims = 256, kDims = kMostDims / 32;

inline int shared_bytes(const Sizes& s) { return (2 * kTile * (s.size + 1) + 2 * kWarps * s.size) * 4; }

// Rows [first, first + kTile) of a slice `size` wide into shared memory, rows size + 1 apart, zeros after `rows`.
template <class T>
STRATA_DEVICE void fill(float* tile, const T* from, int64_t stride, int first, int rows, int size) {
  for (int i = int(threadIdx.x); i < kTile * size; i += kBlock) {
    const int r = i / size, d = i % size;
    tile[r * (size + 1) + d] = first + r < rows ? to_float(from[int64_t(first + r) * stride + d]) : 0.0f;
  }
}

STRATA_DEVICE float dot(const float* a, const float* b, int size) {
  float sum = 0;
  for (int d = 0; d < size; ++d) sum += a[d] * b[d];
  return sum;
}

// sum[d] += Σ over lanes of weight · row lane of the tile, for the dimensions of this lane.
STRATA_DEVICE void add_rows(float (&sum)[kDims], float weight, const float* tile, int size) {
  const int lane = int(threadIdx.x) % 32;
  for (int k = 0; k < kTile; ++k) {
    const float w = __shfl_sync(0xFFFFFFFFu, weight, k);
#pragma unroll
    for (int j = 0; j < kDims; ++j)
      if (j * 32 + lane < size) sum[j] += w * tile[k * (size + 1) + j * 32 + lane];
  }
}

// dots (B, H, T): do · o of each row, a warp a row.
template <class T>
STRATA_KERNEL row_dots(const T* d_out, const T* out, float* dots, Sizes s) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, row = int(blockIdx.x) * kWarps + warp;
  if (row >= s.time) return;
  const int64_t at = (int64_t(blockIdx.z) * s.time + row) * s.heads * s.size + blockIdx.y * s.size;
  float sum = 0;
  for (int d = lane; d < s.size; d += 32) sum += to_float(d_out[at + d]) * to_float(out[at + d]);
  sum = warp_sum(sum);
  if (lane == 0) dots[(int64_t(blockIdx.z) * s.heads + blockIdx.y) * s.time + row] = sum;
}

// body(std::bool_constant<drops>) for an op with and without dropout.
template <class Body>
Launch with_drops(const Sizes& s, Body&& body) {
  return s.dropped.threshold > 0 ? body(std::true_type{}) : body(std::false_type{});
}

// Calls body(T{}, std::integral_constant<int, D>) for types and head sizes that tensor cores take; nothing otherwise.
template <class T, class Body>
Launch on_tensor_cores(const Sizes& s, Body&& body) {
  if constexpr (sizeof(T) == 2) {
    if (s.size == 64) return body(T{}, std::integral_constant<int, 64>{});
    if (s.size == 128) return body(T{}, std::integral_constant<int, 128>{});
  }
  return {};
}

// What the op says of sizes, documents and dropout.
inline Sizes sizes_with(const Binding& b, int qkv, int documents) {
  Sizes s(b, b.input(qkv));
  if (b.has_input(documents)) s.documents = b.in<int32_t>(documents);
  const attention::Dropped dropped = attention::dropped_by(b, qkv == 1);
  if (!dropped.any()) return s;
  s.dropped = {.seed = b.in<double>(documents + 1),
               .step = b.in<double>(documents + 2),
               .stream = uint64_t(b.attributes().integer("stream")),
               .threshold = dropped.threshold,
               .factor = float(dropped.factor),
               .sequence = dropped.sequence,
               .time = dropped.time,
               .row = dropped.row,
               .head = int(dropped.head),
               .heads = int(dropped.heads)};
  return s;
}

}  // namespace strata::cuda::attention_kernels
