// LayerNorm and RMSNorm over the last dimension; sums in f32. A thread holds its columns in registers, so each number
// is read once; the backward pass adds each block's share of the weight's gradient in a fixed order, so results do not
// change from run to run.
#include "cuda/raw.h"
#include "cuda/sum_parts.h"

namespace strata::cuda::norm_kernels {
namespace {

constexpr int kEach = 8;     // columns of an access
constexpr int kParts = 264;  // blocks of the backward pass, each with rows of its own: two a multiprocessor
constexpr int64_t kMost = 4 * 512 * kEach;  // columns

void refuse_wide(int64_t columns) {
  if (columns > kMost)
    throw Error("the cuda backend normalizes at most " + std::to_string(kMost) + " columns, not " +
                std::to_string(columns) + ".");
}

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

// The kEach numbers of an access.
template <class T>
struct Access {
  static constexpr int kCount = Raw<T>::kCount;
  Raw<T> raw[kEach / kCount];
  STRATA_DEVICE Access() {}
  STRATA_DEVICE Access(const T* row, int i, int columns, bool whole) {
#pragma unroll
    for (int p = 0; p < kEach / kCount; ++p) raw[p] = Raw<T>(row, i + p * kCount, columns, whole);
  }
  STRATA_DEVICE void write(T* row, int i, int columns, bool whole) const {
#pragma unroll
    for (int p = 0; p < kEach / kCount; ++p) raw[p].write(row, i + p * kCount, columns, whole);
  }
  STRATA_DEVICE float operator[](int e) const { return raw[e / kCount][e % kCount]; }
  STRATA_DEVICE void set(int e, float x) { raw[e / kCount].set(e % kCount, x); }
};

// Threads of a block that holds kHeld accesses of rows in each: two blocks a multiprocessor where rows are short.
template <int kHeld>
constexpr int kRowThreads = kHeld < 4 ? 384 : 512;

// A row is that of `per_row` threads, a multiple of 32; a block has as many rows at once as fit, and goes on with those
// gridDim.x times as many further. dw and db of its rows go into parts (gridDim.x, 2, columns). What a step waits for
// has been asked for one step before, and a step has one barrier: with a block of 96 threads that waited for each row
// of 768 columns, six warps of a multiprocessor had 6 KB on their way; 25 KB are what memory of 4.7 TB/s wants.
template <class T, int kHeld>
STRATA_KERNEL __launch_bounds__(kRowThreads<kHeld>, kHeld == 1 ? 2 : 1)
    gradient(const T* dy, const T* x, const T* w, const float* statistics, T* dx, float* parts, int64_t rows,
             int columns, int per_row, bool whole, bool layer, bool accumulate, float offset) {
  constexpr bool kAgain = kHeld > 2;  // what a row has is read twice, or registers would be short
  constexpr bool kAhead = kHeld == 1;
  constexpr int kKept = kAgain ? 1 : kHeld;
  __shared__ float sums[2][2][kRowThreads<kHeld> / 32];
  const int groups = int(blockDim.x) / per_row, group = int(threadIdx.x) / per_row;
  const int mine = (int(threadIdx.x) - group * per_row) * kEach, apart = per_row * kEach;
  struct Row {
    Access<T> dy[kKept], x[kKept];
    float mean = 0, inverse = 0;
  };
  const auto row_of = [&](int64_t step) { return (step * gridDim.x + blockIdx.x) * groups + group; };
  const auto read = [&](Row& to, int64_t row, int k) {  // access k
    to.dy[k % kKept] = Access<T>(dy + row * columns, mine + k * apart, columns, whole);
    to.x[k % kKept] = Access<T>(x + row * columns, mine + k * apart, columns, whole);
  };
  const auto read_all = [&](Row& to, int64_t row) {
    if (row >= rows) return;
    if (layer) to.mean = statistics[2 * row];
    to.inverse = statistics[layer ? 2 * row + 1 : row];
#pragma unroll
    for (int k = 0; k < kHeld && !kAgain; ++k) read(to, row, k);
  };
  Access<T> weights[kKept];
  float dw[kHeld][kEach] = {}, db[kHeld][kEach] = {};
#pragma unroll
  for (int k = 0; k < kKept; ++k) weights[k] = Access<T>(w, mine + k * apart, columns, whole);
  Row now, next;
  const int64_t steps = (rows + int64_t(gridDim.x) * groups - 1) / (int64_t(gridDim.x) * groups);
#pragma unroll 1
  for (int64_t step = kAhead ? -1 : 0; step < steps; ++step) {
    if constexpr (kAhead) {
      now = next;
      next = {};
      read_all(next, step + 1 < steps ? row_of(step + 1) : rows);
      if (step < 0) continue;
    } else {
      now = {};
      read_all(now, row_of(step));
    }
    const int64_t row = row_of(step);
    const bool there = row < rows;
    // body(k, e, what is normalized, its slope) for all that the thread has of the row.
    const auto each = [&](int k, auto body) {
      if constexpr (kAgain) {
        if (there) read(now, row, k);
        weights[0] = Access<T>(w, mine + k * apart, columns, whole);
      }
#pragma unroll
      for (int e = 0; e < kEach; ++e)
        body(e, (now.x[k % kKept][e] - now.mean) * now.inverse, now.dy[k % kKept][e], offset + weights[k % kKept][e]);
    };
    Access<T> before[kKept];
    float dot = 0, total = 0;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (accumulate && there && !kAgain)
        before[k % kKept] = Access<T>(dx + row * columns, mine + k * apart, columns, whole);
      each(k, [&](int e, float normed, float slope, float weight) {
        dw[k][e] += slope * normed;
        db[k][e] += slope;
        dot += slope * weight * normed;
        total += slope * weight;
      });
    }
    dot = warp_sum(dot);
    if (layer) total = warp_sum(total);
    auto& of_step = sums[step & 1];
    if (threadIdx.x % 32 == 0) of_step[0][threadIdx.x / 32] = dot, of_step[1][threadIdx.x / 32] = total;
    __syncthreads();
    dot = total = 0;
    for (int warp = group * per_row / 32; warp < (group + 1) * per_row / 32; ++warp) {
      dot += of_step[0][warp];
      total += of_step[1][warp];
    }
    dot /= float(columns);
    total = layer ? total / float(columns) : 0.0f;
    if (!there) continue;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (accumulate && kAgain) before[0] = Access<T>(dx + row * columns, mine + k * apart, columns, whole);
      Access<T> result;
      each(k, [&](int e, float normed, float slope, float weight) {
        result.set(e, (slope * weight - total - normed * dot) * now.inverse + before[k % kKept][e]);
      });
      result.write(dx + row * columns, mine + k * apart, columns, whole);
    }
  }
  // The rows' groups in turn.
  float* const part = parts + int64_t(blockIdx.x) * 2 * columns;
  float* const shared = dynamic_shared<float>();  // (2, columns rounded up to kEach) where there are several groups
  const int width = (columns + kEach - 1) / kEach * kEach;
  for (int turn = 0; turn < groups; ++turn) {
    if (turn == group) {
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        const int i = mine + k * apart;
        if (i >= columns) break;
        if (turn > 0)
#pragma unroll
          for (int e = 0; e < kEach; ++e) dw[k][e] += shared[i + e], db[k][e] += shared[width + i + e];
        if (turn + 1 < groups)
#pragma unroll
          for (int e = 0; e < kEach; ++e) shared[i + e] = dw[k][e], shared[width + i + e] = db[k][e];
        if (turn + 1 == groups) {
          store(part, i, columns, dw[k]);
          store(part + columns, i, columns, db[k]);
        }
      }
    }
    __syncthreads();
  }
}

// Calls body(Size{}, block): accesses and most threads as constants, and the threads of a block.
template <int kHeldPerThread, int kMostThreads>
struct Size {
  static constexpr int held = kHeldPerThread, most = kMostThreads;
};
template <class Body>
Launch with_size(int64_t columns, Body&& body) {
  refuse_wide(columns);
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

// Of a row's gradient: threads, accesses of each, and the rows that a block has at once.
struct Rows {
  int held, per_row, at_once;
  explicit Rows(int64_t columns)
      : held(columns <= kRowThreads<1> * kEach       ? 1
             : columns <= 2 * kRowThreads<2> * kEach ? 2
                                                     : 4),
        per_row(int((columns + 32 * kEach * held - 1) / (32 * kEach * held)) * 32),
        at_once(std::max(1, (held < 4 ? kRowThreads<1> : kRowThreads<4>) / per_row)) {}  // wider rows are only planned
};
int parts_of(const OpView& v) {
  const int at_once = Rows(v.columns(0)).at_once;
  return int(std::min<int64_t>(kParts, (v.rows(0) + at_once - 1) / at_once));
}

Launch bind_gradient(const Binding& b) {
  refuse_wide(b.columns(0));
  const Rows of(b.columns(0));
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    const bool layer = b.outputs() == 3, onto[3] = {b.accumulates(0), b.accumulates(1), layer && b.accumulates(2)};
    return
        [=, dy = b.in<T>(0), x = b.in<T>(1), w = b.in<T>(2), s = b.in<float>(3), dx = b.out<T>(0), dw = b.out<float>(1),
         db = layer ? b.out<float>(2) : nullptr, parts = b.workspace<float>(), rows = b.rows(0), columns = b.columns(0),
         count = parts_of(b), offset = float(b.attributes().real("offset", 0.0)), queue = b.queue()] {
          const auto kernel = of.held == 1 ? gradient<T, 1> : of.held == 2 ? gradient<T, 2> : gradient<T, 4>;
          const bool whole = is_whole<T>(columns, dy, x, w, dx);
          const int shared = of.at_once > 1 ? int((columns + kEach - 1) / kEach * kEach) * 2 * 4 : 0;
          launch(kernel, dim3(unsigned(count)), of.per_row * of.at_once, shared, queue, dy, x, w, s, dx, parts, rows,
                 int(columns), of.per_row, whole, layer, onto[0], offset);
          launch_sum_parts(parts, count, columns, {{dw, db}, {onto[1], onto[2]}}, queue);
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
