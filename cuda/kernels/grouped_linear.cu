// Products of groups of rows with matrices of their own (engine/ops/grouped_linear.cpp), tile by tile: a block finds
// the group that its tile of rows belongs to, since only the device knows how many rows each has.
#include "cuda/tile_product.h"
#include "engine/ops/expert_rounds.h"

namespace strata::cuda::grouped_linear_kernels {
namespace {

// Rows [begin, end) are an expert's, those behind them to `room` nobody's.
struct Rows {
  int64_t begin, end;
};

// One for each source and expert, by offsets (E + 1) or by how many rows of all rounds are filled (N, E).
struct Groups {
  const int32_t* data;
  int64_t experts, count, round;
  ExpertRounds rounds;  // no room where rows are not padded
  explicit Groups(const Binding& b)
      : data(b.in<int32_t>(2)),
        experts(padded(b) ? b.input(2).shape[1] : b.input(2).shape[0] - 1),
        count(padded(b) ? b.input(2).shape[0] * experts : experts),
        round(b.attributes().integer("round", 0)),
        rounds(b, padded(b) ? b.rows(0) / count : 0) {}
  static bool padded(const Binding& b) { return b.input(2).shape.size() == 2; }
  STRATA_DEVICE Rows operator[](int64_t g) const {
    if (rounds.room == 0) return {data[g], data[g + 1]};
    return {g * rounds.room, g * rounds.room + rounds.filled(data[g], round)};
  }
  // Of any row, whether it is somebody's.
  STRATA_DEVICE bool has(int64_t row) const {
    if (rounds.room == 0) return row < data[experts];
    return row < (*this)[row / rounds.room].end;
  }
};

// A block a tile: blockIdx.x counts tiles of rows, group after group, blockIdx.y tiles of columns.
template <class T>
STRATA_KERNEL __launch_bounds__(kTileThreads)
    multiply(const T* x, const T* w, T* y, Groups groups, int64_t in, int64_t out, int64_t rows, int64_t columns,
             bool transpose, bool accumulate) {
  __shared__ int64_t found[2];  // group, row of it
  if (threadIdx.x == 0) {
    int64_t left = blockIdx.x, g = 0;
    for (; g < groups.count; ++g) {
      const Rows of = groups[g];
      const int64_t tiles = (of.end - of.begin + kTile - 1) / kTile;
      if (left < tiles) break;
      left -= tiles;
    }
    found[0] = g, found[1] = left * kTile;
  }
  __syncthreads();
  const int64_t g = found[0], column = int64_t(blockIdx.y) * kTile;
  if (g == groups.count) return;
  const Rows of = groups[g];
  const int64_t row = of.begin + found[1];
  const T* const weight = w + g % groups.experts * rows * columns;
  TileSum sum;
  add_tile_product(TileFactors<T, T>{x + row * in, in, 1, transpose ? weight + column * columns : weight + column,
                                     transpose ? int64_t(1) : columns, transpose ? columns : int64_t(1), of.end - row,
                                     out - column, in},
                   sum);
  store_tile(sum, y + row * out + column, out, of.end - row, out - column, accumulate);
}

template <class T>
STRATA_KERNEL clear_nobodys(T* y, Groups groups, int64_t columns) {
  const int64_t row = blockIdx.x;
  if (groups.has(row)) return;
  for (int64_t c = threadIdx.x; c < columns; c += 128) y[row * columns + c] = from_float<T>(0.0f);
}

// dw (results, m, n): blockIdx.z counts experts, or sources and experts; a result is the sum over groups that are
// `results` apart.
template <class T>
STRATA_KERNEL __launch_bounds__(kTileThreads) weight_gradient(const T* a, const T* b, float* dw, Groups groups,
                                                              int64_t m, int64_t n, int64_t results, bool accumulate) {
  const int64_t i = int64_t(blockIdx.y) * kTile, j = int64_t(blockIdx.x) * kTile, result = blockIdx.z;
  TileSum sum;
  for (int64_t g = result; g < groups.count; g += results) {
    const Rows of = groups[g];
    add_tile_product(
        TileFactors<T, T>{a + of.begin * m + i, 1, m, b + of.begin * n + j, n, 1, m - i, n - j, of.end - of.begin},
        sum);
  }
  store_tile(sum, dw + (result * m + i) * n + j, n, m - i, n - j, accumulate);
}

Launch bind_groups(const Binding& b, bool transpose) {
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    const Groups groups(b);
    return [=, x = b.in<T>(0), w = b.in<T>(1), y = b.out<T>(0), in = b.columns(0), out = b.output(0).shape.back(),
            all = b.rows(0), rows = b.input(1).shape[0] / groups.experts, columns = b.columns(1),
            onto = b.accumulates(0), queue = b.queue()] {
      const dim3 grid(unsigned((all + kTile - 1) / kTile + groups.count), blocks(out, kTile));
      launch(multiply<T>, grid, kTileThreads, 0, queue, x, w, y, groups, in, out, rows, columns, transpose, onto);
      if (!onto) launch(clear_nobodys<T>, dim3(unsigned(all)), 128, 0, queue, y, groups, out);
    };
  });
}

Launch bind_weight_gradient(const Binding& b, bool apart) {
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    const Groups groups(b);
    return [=, left = b.in<T>(0), right = b.in<T>(1), dw = b.out<float>(0), m = b.columns(0), n = b.columns(1),
            results = apart ? groups.count : groups.experts, onto = b.accumulates(0), queue = b.queue()] {
      launch(weight_gradient<T>, dim3(blocks(n, kTile), blocks(m, kTile), unsigned(results)), kTileThreads, 0, queue,
             left, right, dw, groups, m, n, results, onto);
    };
  });
}

// Of `count` arrays, `size` apart, an element a thread: pairs first, as ranks' gradients are summed. What waits for its
// neighbour is a sum over 2^k of them for each bit k of how many came.
STRATA_KERNEL sum_tree(const float* x, float* y, int count, int64_t size) {
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i >= size) return;
  float waiting[32];
  int waits = 0;
  for (int n = 0; n < count; ++n) {
    float sum = x[n * size + i];
    for (int pairs = n; pairs & 1; pairs >>= 1) sum = rounded_sum(waiting[--waits], sum);
    waiting[waits++] = sum;
  }
  float sum = waiting[--waits];
  while (waits > 0) sum = rounded_sum(waiting[--waits], sum);
  y[i] = sum;
}

const Registration kinds[] = {
    {"grouped_linear", [](const Binding& b) { return bind_groups(b, false); }},
    {"grouped_linear_transposed", [](const Binding& b) { return bind_groups(b, true); }},
    {"grouped_linear_weight_gradient", [](const Binding& b) { return bind_weight_gradient(b, false); }},
    {"padded_linear", [](const Binding& b) { return bind_groups(b, false); }},
    {"padded_linear_transposed", [](const Binding& b) { return bind_groups(b, true); }},
    {"padded_linear_weight_gradient", [](const Binding& b) { return bind_weight_gradient(b, false); }},
    {"padded_linear_weight_gradients", [](const Binding& b) { return bind_weight_gradient(b, true); }},
    {"sum_of_sources", [](const Binding& b) -> Launch {
       return [x = b.in<float>(0), y = b.out<float>(0), count = int(b.input(0).shape[0]),
               size = strata::cuda::count(b.output(0)),
               queue = b.queue()] { launch(sum_tree, dim3(blocks(size, 256)), 256, 0, queue, x, y, count, size); };
     }}};

}  // namespace
}  // namespace strata::cuda::grouped_linear_kernels
