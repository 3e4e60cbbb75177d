// LayerNorm and RMSNorm over the last dimension, a block a row; sums in f32. The backward pass adds each block's share
// of the weight's gradient in a fixed order, so results do not change from run to run.
#include "cuda/bind.h"

namespace strata::cuda::norm_kernels {
namespace {

constexpr int kBlock = 256, kEach = 8, kParts = 128;  // kParts: blocks of the backward pass, each with rows of its own

template <class T>
STRATA_KERNEL norm(const T* x, const T* w, const T* bias, T* y, float* statistics, int64_t columns, float epsilon) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  const T* from = x + row * columns;
  const bool layer = bias != nullptr;
  float sum = 0, v[kEach];
  if (layer)
    for (int64_t i = int64_t(threadIdx.x) * kEach; i < columns; i += kBlock * kEach) {
      load(from, i, columns, v);
#pragma unroll
      for (int e = 0; e < kEach; ++e) sum += v[e];
    }
  const float mean = layer ? block_sum(sum, scratch) / float(columns) : 0.0f;
  float squares = 0;
  for (int64_t i = int64_t(threadIdx.x) * kEach; i < columns; i += kBlock * kEach) {
    load(from, i, columns, v);
#pragma unroll
    for (int e = 0; e < kEach; ++e) squares += i + e < columns ? (v[e] - mean) * (v[e] - mean) : 0.0f;
  }
  const float inverse = rsqrtf(block_sum(squares, scratch) / float(columns) + epsilon);
  if (threadIdx.x == 0) {
    if (layer) statistics[2 * row] = mean;
    statistics[layer ? 2 * row + 1 : row] = inverse;
  }
  float weight[kEach], shift[kEach];
  for (int64_t i = int64_t(threadIdx.x) * kEach; i < columns; i += kBlock * kEach) {
    load(from, i, columns, v);
    load(w, i, columns, weight);
    if (layer) load(bias, i, columns, shift);
#pragma unroll
    for (int e = 0; e < kEach; ++e) v[e] = (v[e] - mean) * inverse * weight[e] + (layer ? shift[e] : 0.0f);
    store(y + row * columns, i, columns, v);
  }
}

// Rows blockIdx.x, blockIdx.x + gridDim.x, …; dw and db of these rows into parts (gridDim.x, 2, columns).
template <class T>
STRATA_KERNEL gradient(const T* dy, const T* x, const T* w, const float* statistics, T* dx, float* parts, int64_t rows,
                       int64_t columns, bool layer, bool accumulate) {
  __shared__ float scratch[32];
  float* dw = parts + int64_t(blockIdx.x) * 2 * columns;
  float* db = dw + columns;
  float g[kEach], v[kEach], weight[kEach], sum[kEach];
  for (int64_t i = int64_t(threadIdx.x) * kEach; i < columns; i += kBlock * kEach)
    for (int e = 0; e < kEach && i + e < columns; ++e) dw[i + e] = db[i + e] = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const float mean = layer ? statistics[2 * row] : 0.0f, inverse = statistics[layer ? 2 * row + 1 : row];
    float dot = 0, total = 0;
    for (int64_t i = int64_t(threadIdx.x) * kEach; i < columns; i += kBlock * kEach) {
      load(dy + row * columns, i, columns, g);
      load(x + row * columns, i, columns, v);
      load(w, i, columns, weight);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (i + e >= columns) continue;
        const float normed = (v[e] - mean) * inverse;
        dot += g[e] * weight[e] * normed;
        total += g[e] * weight[e];
        dw[i + e] += g[e] * normed;  // this thread's own columns in every row
        db[i + e] += g[e];
      }
    }
    dot = block_sum(dot, scratch) / float(columns);
    total = layer ? block_sum(total, scratch) / float(columns) : 0.0f;
    for (int64_t i = int64_t(threadIdx.x) * kEach; i < columns; i += kBlock * kEach) {
      load(dy + row * columns, i, columns, g);
      load(x + row * columns, i, columns, v);
      load(w, i, columns, weight);
      if (accumulate) load(static_cast<const T*>(dx) + row * columns, i, columns, sum);
#pragma unroll
      for (int e = 0; e < kEach; ++e)
        g[e] = (g[e] * weight[e] - total - (v[e] - mean) * inverse * dot) * inverse + (accumulate ? sum[e] : 0.0f);
      store(dx + row * columns, i, columns, g);
    }
  }
}

STRATA_KERNEL add_parts(const float* parts, int count, int64_t stride, float* out, int64_t columns, bool accumulate) {
  const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= columns) return;
  float sum = accumulate ? out[i] : 0.0f;
  for (int p = 0; p < count; ++p) sum += parts[p * stride + i];
  out[i] = sum;
}

Launch bind_norm(const Binding& b) {
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    const float epsilon = float(b.attributes().real("epsilon"));
    return [=, x = b.in<T>(0), w = b.in<T>(1), bias = b.in<T>(2), y = b.out<T>(0), s = b.out<float>(1),
            rows = b.rows(0), columns = b.columns(0), queue = b.queue()] {
      launch(norm<T>, dim3(unsigned(rows)), kBlock, 0, queue, x, w, bias, y, s, columns, epsilon);
    };
  });
}

int parts_of(const OpView& v) { return int(std::min<int64_t>(kParts, v.rows(0))); }

Launch bind_gradient(const Binding& b) {
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    const bool layer = b.outputs() == 3, onto[3] = {b.accumulates(0), b.accumulates(1), layer && b.accumulates(2)};
    return [=, dy = b.in<T>(0), x = b.in<T>(1), w = b.in<T>(2), s = b.in<float>(3), dx = b.out<T>(0),
            dw = b.out<float>(1), db = layer ? b.out<float>(2) : nullptr, parts = b.workspace<float>(),
            rows = b.rows(0), columns = b.columns(0), count = parts_of(b), queue = b.queue()] {
      launch(gradient<T>, dim3(unsigned(count)), kBlock, 0, queue, dy, x, w, s, dx, parts, rows, columns, layer,
             onto[0]);
      const dim3 grid(blocks(columns, kBlock));
      launch(add_parts, grid, kBlock, 0, queue, parts, count, 2 * columns, dw, columns, onto[1]);
      if (layer) launch(add_parts, grid, kBlock, 0, queue, parts + columns, count, 2 * columns, db, columns, onto[2]);
    };
  });
}
int64_t gradient_workspace(const OpView& v, int) { return parts_of(v) * 2 * v.columns(0) * 4; }

const Registration kinds[] = {{"layer_norm", bind_norm},
                              {"rms_norm", bind_norm},
                              {"layer_norm_gradient", bind_gradient, gradient_workspace},
                              {"rms_norm_gradient", bind_gradient, gradient_workspace}};

}  // namespace
}  // namespace strata::cuda::norm_kernels
