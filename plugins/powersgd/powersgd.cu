// PowerSGD on the GPU: what powersgd_kernel.h says, each pass over the matrix once. Products with all of it are
// cuBLASLt's; what every rank must make alike, the basis and the sum, comes from kernels with one order of additions.
#include <memory>

#include "cuda/bind.h"
#include "cuda/gemm.h"
#include "strata/layout.h"

namespace strata::cuda::powersgd_kernels {
namespace {

constexpr int kBlock = 256, kEach = 8;
constexpr int kRows = 16, kRanks = kBlock / kRows;  // rows of a block's part of a sum; of the basis, loaded at a time

STRATA_DEVICE bool skips(const double* overflow) { return overflow && *overflow != *overflow; }

template <class T>
STRATA_KERNEL add(const T* gradient, float* matrix, int64_t count, const double* overflow) {
  const int64_t i = (int64_t(blockIdx.x) * kBlock + threadIdx.x) * kEach;
  if (i >= count || skips(overflow)) return;
  float g[kEach], sum[kEach];
  load(gradient, i, count, g);
  load(static_cast<const float*>(matrix), i, count, sum);
#pragma unroll
  for (int e = 0; e < kEach; ++e) sum[e] = rounded_sum(sum[e], g[e]);
  store(matrix, i, count, sum);
}

// Zeros, in a step that overflowed, or where `overflow` is null.
STRATA_KERNEL clear(float* x, int64_t count, const double* overflow) {
  const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (i < count && (!overflow || skips(overflow))) x[i] = 0;
}

// A block a pair of rows, l <= k: products of f32 are exact in f64, and are added in one order.
STRATA_KERNEL products_of_rows(const float* x, int64_t length, double* products) {
  __shared__ double sums[kBlock];
  const int k = int(blockIdx.x), l = int(blockIdx.y), t = int(threadIdx.x);
  if (l > k) return;
  const float *const a = x + k * length, *const b = x + l * length;
  double sum = 0;
  for (int64_t i = t; i < length; i += kBlock) sum = rounded_sum(sum, double(a[i]) * double(b[i]));
  sums[t] = sum;
  __syncthreads();
  for (int width = kBlock / 2; width > 0; width /= 2) {
    if (t < width) sums[t] += sums[t + width];
    __syncthreads();
  }
  if (t == 0) products[int64_t(k) * gridDim.x + l] = sums[0];
}

// The Gram-Schmidt process on the products alone, one block: row k of `transform`, (rank, rank) and lower triangular,
// makes of the rows so far one that is orthogonal to those before it, of length 1, or 0 where it depends on them.
// `along`: rank numbers.
STRATA_KERNEL orthogonal_transform(const double* products, int rank, double* transform, double* along) {
  constexpr double kNothing = 1e-6;  // below this part of its length, what is left of a row is rounding
  const int t = int(threadIdx.x);
  for (int k = 0; k < rank; ++k) {
    const double* const with = products + int64_t(k) * rank;
    for (int l = t; l < k; l += kBlock) {
      double sum = 0;
      for (int m = 0; m <= l; ++m) sum = rounded_sum(sum, rounded_product(transform[int64_t(l) * rank + m], with[m]));
      along[l] = sum;
    }
    __syncthreads();
    double square = with[k];
    for (int l = 0; l < k; ++l) square = rounded_sum(square, -rounded_product(along[l], along[l]));
    const bool nothing = square <= kNothing * kNothing * with[k];  // not where it is NaN, which is to be seen
    const double length = sqrt(square);
    for (int m = t; m <= k; m += kBlock) {
      double sum = m == k ? 1 : 0;
      for (int l = m; l < k; ++l) sum = rounded_sum(sum, -rounded_product(along[l], transform[int64_t(l) * rank + m]));
      transform[int64_t(k) * rank + m] = nothing ? 0 : sum / length;
    }
    __syncthreads();
  }
}

// y = transform x, a thread a column, from the last row: y may be x.
STRATA_KERNEL combine_rows(const double* transform, int rank, int64_t length, const float* x, float* y) {
  const int64_t i = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= length) return;
  for (int k = rank - 1; k >= 0; --k) {
    double sum = 0;
    for (int m = 0; m <= k; ++m)
      sum = rounded_sum(sum, rounded_product(transform[int64_t(k) * rank + m], double(x[m * length + i])));
    y[k * length + i] = float(sum);
  }
}

struct Sum {
  int64_t rows, columns, rank;
  float part;            // of one rank
  int64_t first, count;  // rows of the result
  const float *basis, *right;
  float* matrix;
  const double* overflow;
};

// kRows rows of kBlock columns: a thread has a column of them.
template <class T>
STRATA_KERNEL finish(Sum s, T* result) {
  __shared__ float basis[kRanks][kRows];
  const int64_t top = int64_t(blockIdx.x) * kRows, j = int64_t(blockIdx.y) * kBlock + threadIdx.x;
  const int load_k = int(threadIdx.x) / kRows, load_row = int(threadIdx.x) % kRows;
  const bool skipped = skips(s.overflow);
  float sum[kRows] = {};
  for (int64_t k = 0; k < s.rank && !skipped; k += kRanks) {
    basis[load_k][load_row] =
        k + load_k < s.rank && top + load_row < s.rows ? s.basis[(k + load_k) * s.rows + top + load_row] : 0.0f;
    __syncthreads();
    for (int some = 0; some < kRanks && k + some < s.rank && j < s.columns; ++some) {
      const float right = s.right[(k + some) * s.columns + j];
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum[r] = rounded_sum(sum[r], rounded_product(basis[some][r], right));
    }
    __syncthreads();
  }
  if (j >= s.columns) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t i = top + r;
    if (i >= s.rows) break;
    float& left = s.matrix[i * s.columns + j];
    if (!skipped) left = rounded_sum(left, -rounded_product(s.part, sum[r]));
    if (i >= s.first && i < s.first + s.count) result[(i - s.first) * s.columns + j] = from_float<T>(sum[r]);
  }
}

// The next query: rows of right, a block each, but for those that are 0.
STRATA_KERNEL keep_query(const float* right, int64_t columns, const double* overflow, float* query) {
  __shared__ int any;
  if (skips(overflow)) return;
  if (threadIdx.x == 0) any = 0;
  __syncthreads();
  const int64_t row = int64_t(blockIdx.x) * columns;
  for (int64_t j = threadIdx.x; j < columns; j += kBlock)
    if (right[row + j] != 0) any = 1;
  __syncthreads();
  if (any)
    for (int64_t j = threadIdx.x; j < columns; j += kBlock) query[row + j] = right[row + j];
}

// C = A op(B) in f32, or 0 where there is nothing to add up.
Launch product(const Binding& b, const GemmShape& shape, const float* A, const float* B, float* C) {
  if (shape.m * shape.n * shape.k == 0)
    return [C, count = shape.m * shape.n, queue = b.queue()] {
      launch(clear, dim3(blocks(count, kBlock)), kBlock, 0, queue, C, count, static_cast<const double*>(nullptr));
    };
  const GemmMemory memory{A, B, C, b.workspace()};
  return [gemm = std::make_shared<Gemm>(shape, memory), memory, queue = b.queue()] { gemm->run(memory, queue); };
}

const double* overflow_of(const Binding& b) {
  return b.has_input(b.inputs() - 1) ? b.in<double>(b.inputs() - 1) : nullptr;
}

Launch bind_project(const Binding& b) {
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    const int64_t rows = b.input(0).shape[0], columns = b.columns(0), rank = b.input(2).shape[0];
    const GemmShape shape{false, true, rank, rows, columns, columns, columns, rows, DType::f32, DType::f32};
    return [=, gradient = b.in<T>(0), matrix = b.out<float>(1), left = b.out<float>(0), overflow = overflow_of(b),
            multiply = product(b, shape, b.in<float>(2), b.out<float>(1), b.out<float>(0)), queue = b.queue()] {
      launch(add<T>, dim3(blocks(rows * columns, kBlock * kEach)), kBlock, 0, queue, gradient, matrix, rows * columns,
             overflow);
      multiply();
      if (overflow) launch(clear, dim3(blocks(rank * rows, kBlock)), kBlock, 0, queue, left, rank * rows, overflow);
    };
  });
}

// Twice, since one Gram-Schmidt process leaves what rounding has left of nearly dependent rows.
Launch bind_back(const Binding& b) {
  const int64_t rows = b.columns(0), columns = b.columns(1), rank = b.input(0).shape[0];
  const GemmShape shape{false, false, rank, columns, rows, rows, columns, columns, DType::f32, DType::f32};
  double* const products = b.workspace<double>();
  return [=, left = b.in<float>(0), basis = b.out<float>(0), transform = products + rank * rank,
          multiply = product(b, shape, b.out<float>(0), b.in<float>(1), b.out<float>(1)), queue = b.queue()] {
    for (const float* from : {left, static_cast<const float*>(basis)}) {
      launch(products_of_rows, dim3(unsigned(rank), unsigned(rank)), kBlock, 0, queue, from, rows, products);
      launch(orthogonal_transform, dim3(1), kBlock, 0, queue, products, int(rank), transform, transform + rank * rank);
      launch(combine_rows, dim3(blocks(rows, kBlock)), kBlock, 0, queue, transform, int(rank), rows, from, basis);
    }
    multiply();
  };
}
int64_t workspace_of_back(const OpView& v, int) {
  const int64_t rank = v.input(0).shape[0];
  return std::max<int64_t>(Gemm::workspace(), (2 * rank * rank + rank) * int64_t(sizeof(double)));
}

Launch bind_finish(const Binding& b) {
  const Tensor& result = b.output(0);
  const Split* const share =
      b.attributes().has("axis") ? last_split(result, 0, b.attributes().string("axis")) : nullptr;
  const Sum sum{.rows = b.input(0).shape[0],
                .columns = b.columns(0),
                .rank = b.input(1).shape[0],
                .part = 1.0f / float(b.attributes().integer("ranks")),
                .first = share ? share->first : 0,
                .count = result.shape[0],
                .basis = b.in<float>(2),
                .right = b.in<float>(3),
                .matrix = b.out<float>(1),
                .overflow = overflow_of(b)};
  return with_type(result.dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    return [=, to = b.out<T>(0), query = b.out<float>(2), queue = b.queue()] {
      launch(finish<T>, dim3(blocks(sum.rows, kRows), blocks(sum.columns, kBlock)), kBlock, 0, queue, sum, to);
      launch(keep_query, dim3(unsigned(sum.rank)), kBlock, 0, queue, sum.right, sum.columns, sum.overflow, query);
    };
  });
}

const Registration kinds[] = {{"powersgd_project", bind_project, [](const OpView&, int) { return Gemm::workspace(); }},
                              {"powersgd_back", bind_back, workspace_of_back},
                              {"powersgd_finish", bind_finish}};

}  // namespace
}  // namespace strata::cuda::powersgd_kernels
