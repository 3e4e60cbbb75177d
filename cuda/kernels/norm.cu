// LayerNorm and RMSNorm over the last dimension; sums in f32. A thread holds its columns in registers, so each number
// is read once; the backward pass adds each block's share of the weight's gradient in a fixed order, so results do not
// change from run to run.
#include "cuda/sum_parts.h"

namespace strata::cuda::norm_kernels {
namespace {

constexpr int kEach = 8;     // columns of an access
constexpr int kParts = 264;  // blocks of the backward pass, each with rows of its own: two a multiprocessor
constexpr int64_t kMost = 4 * 512 * kEach;  // columns

// kHeld accesses a thread: columns (threadIdx.x + k blockDim.x) kEach and on.
STRATA_DEVICE int64_t column(int k) { return (int64_t(k) * blockDim.x + threadIdx.x) * kEach; }

// A block a row.
template <class T, int kHeld, int kThreads>
STRATA_KERNEL __launch_bounds__(kThreads)
    norm(const T* x, const T* w, const T* bias, T* y, float* statistics, int64_t columns, float epsilon, float offset) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  const bool layer = bias != nullptr;
  float v[kHeld][kEach], sum = 0, squares = 0;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    load(x + row * columns, column(k), columns, v[k]);  // zeros beyond the end
#pragma unroll
    for (int e = 0; e < kEach; ++e) sum += v[k][e];
  }
  const float mean = layer ? block_sum(sum, scratch) / float(columns) : 0.0f;
#pragma unroll
  for (int k = 0; k < kHeld; ++k)
#pragma unroll
    for (int e = 0; e < kEach; ++e) squares += column(k) + e < columns ? (v[k][e] - mean) * (v[k][e] - mean) : 0.0f;
  const float inverse = rsqrtf(block_sum(squares, scratch) / float(columns) + epsilon);
  if (threadIdx.x == 0) {
    if (layer) statistics[2 * row] = mean;
    statistics[layer ? 2 * row + 1 : row] = inverse;
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    float weight[kEach], shift[kEach];
    if (column(k) >= columns) break;
    load(w, column(k), columns, weight);
    if (layer) load(bias, column(k), columns, shift);
#pragma unroll
    for (int e = 0; e < kEach; ++e)
      v[k][e] = (v[k][e] - mean) * inverse * (offset + weight[e]) + (layer ? shift[e] : 0.0f);
    store(y + row * columns, column(k), columns, v[k]);
  }
}

// Rows blockIdx.x, blockIdx.x + gridDim.x, …; dw and db of these rows into parts (gridDim.x, 2, columns).
template <class T, int kHeld, int kThreads>
STRATA_KERNEL __launch_bounds__(kThreads)
    gradient(const T* dy, const T* x, const T* w, const float* statistics, T* dx, float* parts, int64_t rows,
             int64_t columns, bool layer, bool accumulate, float offset) {
  __shared__ float scratch[32];
  float dw[kHeld][kEach] = {}, db[kHeld][kEach] = {}, weight[kHeld][kEach];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) load(w, column(k), columns, weight[k]);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const float mean = layer ? statistics[2 * row] : 0.0f, inverse = statistics[layer ? 2 * row + 1 : row];
    float g[kHeld][kEach], normed[kHeld][kEach], dot = 0, total = 0;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      load(dy + row * columns, column(k), columns, g[k]);  // zeros beyond the end
      load(x + row * columns, column(k), columns, normed[k]);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        normed[k][e] = (normed[k][e] - mean) * inverse;
        dw[k][e] += g[k][e] * normed[k][e];
        db[k][e] += g[k][e];
        g[k][e] *= offset + weight[k][e];
        dot += g[k][e] * normed[k][e];
        total += g[k][e];
      }
    }
    dot = block_sum(dot, scratch) / float(columns);
    total = layer ? block_sum(total, scratch) / float(columns) : 0.0f;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      float sum[kEach] = {};
      if (column(k) >= columns) break;
      if (accumulate) load(static_cast<const T*>(dx) + row * columns, column(k), columns, sum);
#pragma unroll
      for (int e = 0; e < kEach; ++e) g[k][e] = (g[k][e] - total - normed[k][e] * dot) * inverse + sum[e];
      store(dx + row * columns, column(k), columns, g[k]);
    }
  }
  float* const part = parts + int64_t(blockIdx.x) * 2 * columns;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    store(part, column(k), columns, dw[k]);
    store(part + columns, column(k), columns, db[k]);
  }
}

// Calls body(Size{}, block): accesses and most threads as constants, and the threads of a block.
template <int kHeldPerThread, int kMostThreads>
struct Size {
  static constexpr int held = kHeldPerThread, most = kMostThreads;
};
template <class Body>
Launch with_size(int64_t columns, Body&& body) {
  if (columns > kMost)
    throw Error("the cuda backend normalizes at most " + std::to_string(kMost) + " columns, not " +
                std::to_string(columns) + ".");
  const auto call = [&](auto size) {
    constexpr int64_t kWarp = 32 * kEach * decltype(size)::held;
    return body(size, int((columns + kWarp - 1) / kWarp) * 32);
  };
  if (columns <= 1 * 256 * kEach) return call(Size<1, 256>{});
  if (columns <= 2 * 256 * kEach) return call(Size<2, 256>{});
  if (columns <= 2 * 512 * kEach) return call(Size<2, 512>{});
  return call(Size<4, 512>{});
}

Launch bind_norm(const Binding& b) {
  return with_type(b.input(0).dtype, [&](auto zero) {
    return with_size(b.columns(0), [&](auto size, int block) -> Launch {
      using T = decltype(zero);
      const float epsilon = float(b.attributes().real("epsilon")), offset = float(b.attributes().real("offset", 0.0));
      return [=, x = b.in<T>(0), w = b.in<T>(1), bias = b.in<T>(2), y = b.out<T>(0), s = b.out<float>(1),
              rows = b.rows(0), columns = b.columns(0), queue = b.queue()] {
        launch(norm<T, decltype(size)::held, decltype(size)::most>, dim3(unsigned(rows)), block, 0, queue, x, w, bias,
               y, s, columns, epsilon, offset);
      };
    });
  });
}

int parts_of(const OpView& v) { return int(std::min<int64_t>(kParts, v.rows(0))); }

Launch bind_gradient(const Binding& b) {
  return with_type(b.input(0).dtype, [&](auto zero) {
    return with_size(b.columns(0), [&](auto size, int block) -> Launch {
      using T = decltype(zero);
      const bool layer = b.outputs() == 3, onto[3] = {b.accumulates(0), b.accumulates(1), layer && b.accumulates(2)};
      return [=, dy = b.in<T>(0), x = b.in<T>(1), w = b.in<T>(2), s = b.in<float>(3), dx = b.out<T>(0),
              dw = b.out<float>(1), db = layer ? b.out<float>(2) : nullptr, parts = b.workspace<float>(),
              rows = b.rows(0), columns = b.columns(0), count = parts_of(b),
              offset = float(b.attributes().real("offset", 0.0)), queue = b.queue()] {
        launch(gradient<T, decltype(size)::held, decltype(size)::most>, dim3(unsigned(count)), block, 0, queue, dy, x,
               w, s, dx, parts, rows, columns, layer, onto[0], offset);
        launch_sum_parts(parts, count, 2 * columns, dw, columns, onto[1], queue);
        if (layer) launch_sum_parts(parts + columns, count, 2 * columns, db, columns, onto[2], queue);
      };
    });
  });
}
int64_t gradient_workspace(const OpView& v, int) { return parts_of(v) * 2 * v.columns(0) * 4; }

const Registration kinds[] = {{"layer_norm", bind_norm},
                              {"rms_norm", bind_norm},
                              {"layer_norm_gradient", bind_gradient, gradient_workspace},
                              {"rms_norm_gradient", bind_gradient, gradient_workspace}};

}  // namespace
}  // namespace strata::cuda::norm_kernels
