// Sums: rows of a matrix (gradients of biases), squares of a tensor exactly (norms). No atomics: orders are fixed.
#include "cuda/sum_parts.h"
#include "strata/exact_sum.h"

namespace strata::cuda::reduce_kernels {
namespace {

constexpr int kBlock = 256, kEach = 8;
constexpr int kGroups = 16, kLanes = kBlock / kGroups;  // of a block: columns in groups of kEach, rows in lanes
constexpr int kParts = 64;

// Columns in blockIdx.x, rows of part blockIdx.y, into parts (gridDim.y, columns).
template <class T>
STRATA_KERNEL sum_rows(const T* x, float* parts, int64_t rows, int64_t columns) {
  __shared__ float sums[kLanes * kGroups * kEach];
  const int group = int(threadIdx.x) % kGroups, lane = int(threadIdx.x) / kGroups;
  const int64_t i = (int64_t(blockIdx.x) * kGroups + group) * kEach;
  const int64_t begin = rows * blockIdx.y / gridDim.y, end = rows * (blockIdx.y + 1) / gridDim.y;
  float sum[kEach] = {}, v[kEach];
  for (int64_t r = begin + lane; r < end && i < columns; r += kLanes) {
    load(x + r * columns, i, columns, v);
#pragma unroll
    for (int e = 0; e < kEach; ++e) sum[e] += v[e];
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) sums[(lane * kGroups + group) * kEach + e] = sum[e];
  __syncthreads();
  const int column = int(threadIdx.x);  // one a thread, of the block's kGroups · kEach
  const int64_t at = int64_t(blockIdx.x) * kGroups * kEach + column;
  if (column >= kGroups * kEach || at >= columns) return;
  float total = 0;
  for (int l = 0; l < kLanes; ++l) total += sums[l * kGroups * kEach + column];
  parts[blockIdx.y * columns + at] = total;
}

int parts_of(const OpView& v) { return int(std::min<int64_t>(kParts, (v.rows(0) + kLanes - 1) / kLanes)); }

const Registration rows(
    "sum_rows",
    [](const Binding& b) -> Launch {
      return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
        using T = decltype(zero);
        return [=, x = b.in<T>(0), y = b.out<float>(0), rows = b.rows(0), columns = b.columns(0),
                onto = b.accumulates(0), parts = b.workspace<float>(), count = parts_of(b), queue = b.queue()] {
          launch(sum_rows<T>, dim3(blocks(columns, kGroups * kEach), unsigned(count)), kBlock, 0, queue, x, parts, rows,
                 columns);
          launch_sum_parts(parts, count, columns, y, columns, onto, queue);
        };
      });
    },
    [](const OpView& v, int) { return parts_of(v) * v.columns(0) * 4; });

// A block a row: its sum of squares in f64, in a fixed tree.
template <class T>
STRATA_KERNEL row_squares(const T* x, double* sums, int64_t length) {
  __shared__ double lanes[kBlock];
  const T* row = x + int64_t(blockIdx.x) * length;
  double sum = 0;
  for (int64_t i = int64_t(threadIdx.x) * 8; i < length; i += kBlock * 8) {
    float v[8];
    load(row, i, length, v);
    float squares = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) squares += v[e] * v[e];
    sum += double(squares);
  }
  lanes[threadIdx.x] = sum;
  __syncthreads();
  for (int width = kBlock / 2; width > 0; width /= 2) {
    if (int(threadIdx.x) < width) lanes[threadIdx.x] += lanes[threadIdx.x + width];
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = lanes[0];
}

// Rows are added exactly (strata/exact_sum.h), so their order does not matter: each thread has a sum of its own.
STRATA_KERNEL add_rows_exactly(const double* sums, int64_t count, double* out) {
  double* const all = dynamic_shared<double>();  // (32, kExactSum)
  double* const mine = all + threadIdx.x * kExactSum;
  for (int k = 0; k < kExactSum; ++k) mine[k] = 0;
  for (int64_t i = threadIdx.x; i < count; i += 32) add_exactly(mine, sums[i]);
  carry(mine);
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int k = 0; k < kExactSum; ++k) {
    double sum = 0;
    for (int t = 0; t < 32; ++t) sum += all[t * kExactSum + k];
    mine[k] = sum;
  }
  carry(mine);
  for (int k = 0; k < kExactSum; ++k) out[k] = mine[k];
}

// Of a vector, whose rows are its elements.
template <class T>
STRATA_KERNEL add_squares_exactly(const T* x, int64_t count, double* out) {
  double* const all = dynamic_shared<double>();  // (kBlock, kExactSum)
  double* const mine = all + threadIdx.x * kExactSum;
  for (int k = 0; k < kExactSum; ++k) mine[k] = 0;
  for (int64_t i = threadIdx.x; i < count; i += kBlock) {
    const double value = double(to_float(x[i]));
    add_exactly(mine, value * value);
  }
  carry(mine);
  __syncthreads();
  double sum = 0;
  for (int t = 0; t < kBlock && threadIdx.x < kExactSum; ++t) sum += all[t * kExactSum + int(threadIdx.x)];
  __syncthreads();
  if (threadIdx.x < kExactSum) all[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  carry(all);
  for (int k = 0; k < kExactSum; ++k) out[k] = all[k];
}

bool is_vector(const OpView& v) { return v.input(0).shape.size() == 1; }

const Registration squares(
    "sum_of_squares",
    [](const Binding& b) -> Launch {
      return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
        using T = decltype(zero);
        return [=, x = b.in<T>(0), out = b.out<double>(0), rows = b.input(0).shape[0], all = count(b.input(0)),
                vector = is_vector(b), sums = b.workspace<double>(), queue = b.queue()] {
          if (vector)
            return launch(add_squares_exactly<T>, dim3(1), kBlock, kBlock * kExactSum * 8, queue, x, all, out);
          if (rows > 0) launch(row_squares<T>, dim3(unsigned(rows)), kBlock, 0, queue, x, sums, all / rows);
          launch(add_rows_exactly, dim3(1), 32, 32 * kExactSum * 8, queue, sums, rows, out);
        };
      });
    },
    [](const OpView& v, int) { return is_vector(v) ? 0 : v.input(0).shape[0] * 8; });

constexpr int kMostSums = 256;
struct Sums {
  const double* from[kMostSums];
};
STRATA_KERNEL add_sums(Sums sums, int count, double* out, bool first) {
  const int k = int(threadIdx.x);
  double sum = first ? 0 : out[k];
  for (int i = 0; i < count; ++i) sum += sums.from[i][k];
  out[k] = sum;
}
STRATA_KERNEL carry_sum(double* out) { carry(out); }

const Registration sums("add_sums", [](const Binding& b) -> Launch {
  std::vector<std::pair<Sums, int>> groups;
  for (int i = 0; i < b.inputs(); ++i) {
    if (i % kMostSums == 0) groups.push_back({});
    groups.back().first.from[groups.back().second++] = b.in<double>(i);
  }
  return [=, out = b.out<double>(0), queue = b.queue()] {
    for (size_t g = 0; g < groups.size(); ++g) {
      launch(add_sums, dim3(1), kExactSum, 0, queue, groups[g].first, groups[g].second, out, g == 0);
      launch(carry_sum, dim3(1), 1, 0, queue, out);
    }
  };
});

}  // namespace
}  // namespace strata::cuda::reduce_kernels
