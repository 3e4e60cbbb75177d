// Embeddings, forward and backward. The weight's gradient sums the rows of a token in their order, without atomics, so
// that runs repeat bit for bit.
#include "cuda/bind.h"
#include "strata/layout.h"

namespace strata::cuda::embedding_kernels {
namespace {

constexpr int kBlock = 128, kEach = 8;

// Rows of the vocabulary that this rank has: tokens of others are zeros here.
struct OwnRows {
  int64_t first, count;
  explicit OwnRows(const Tensor& table) : first(box_of(table).offset[0]), count(table.shape[0]) {}
};

template <class T>
STRATA_KERNEL embed(const int32_t* tokens, const T* w, const T* positions, T* x, int64_t time, Indices at,
                    const int32_t* documents, int64_t columns, int64_t first, int64_t own) {
  const int64_t row = blockIdx.x, from = tokens[row] - first;
  const int64_t position = at(row % time) - (documents ? documents[row] : 0);
  const bool here = from >= 0 && from < own;
  float v[kEach], p[kEach];
  for (int64_t i = int64_t(threadIdx.x) * kEach; i < columns; i += kBlock * kEach) {
    if (!here) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) v[e] = 0;
      store(x + row * columns, i, columns, v);
      continue;
    }
    load(w + from * columns, i, columns, v);
    if (positions) {
      load(positions + position * columns, i, columns, p);
#pragma unroll
      for (int e = 0; e < kEach; ++e) v[e] += p[e];
    }
    store(x + row * columns, i, columns, v);
  }
}

STRATA_KERNEL clear(float* out, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i < count) out[i] = 0;
}

// A block a row: that of a token's first row sums all rows of the token; the others leave.
template <class T>
STRATA_KERNEL embedding_gradient(const T* dx, const int32_t* tokens, float* dw, int64_t rows, int64_t columns,
                                 int64_t first, int64_t own) {
  __shared__ int earlier;
  const int64_t row = blockIdx.x;
  const int32_t token = tokens[row];
  const int64_t to = token - first;
  if (to < 0 || to >= own) return;
  if (threadIdx.x == 0) earlier = 0;
  __syncthreads();
  for (int64_t r = threadIdx.x; r < row; r += kBlock)
    if (tokens[r] == token) earlier = 1;
  __syncthreads();
  if (earlier) return;
  const int lane = int(threadIdx.x) % 32;
  for (int64_t base = 0; base < columns; base += kBlock * kEach) {
    const int64_t i = base + int64_t(threadIdx.x) * kEach;
    float sum[kEach], v[kEach];
    load(static_cast<const float*>(dw) + to * columns, i, columns, sum);
    for (int64_t r = row; r < rows; r += 32) {
      unsigned same = __ballot_sync(0xFFFFFFFFu, r + lane < rows && tokens[r + lane] == token);
      for (; same; same &= same - 1) {
        load(dx + (r + __ffs(same) - 1) * columns, i, columns, v);
#pragma unroll
        for (int e = 0; e < kEach; ++e) sum[e] += v[e];
      }
    }
    store(dw + to * columns, i, columns, sum);
  }
}

template <class T>
STRATA_KERNEL position_gradient(const T* dx, float* dp, int64_t batch, int64_t time, Indices at, int64_t columns) {
  const int64_t t = blockIdx.x;
  dp += at(t) * columns;
  float sum[kEach], v[kEach];
  for (int64_t i = int64_t(threadIdx.x) * kEach; i < columns; i += kBlock * kEach) {
    load(static_cast<const float*>(dp), i, columns, sum);
    for (int64_t n = 0; n < batch; ++n) {
      load(dx + (n * time + t) * columns, i, columns, v);
#pragma unroll
      for (int e = 0; e < kEach; ++e) sum[e] += v[e];
    }
    store(dp, i, columns, sum);
  }
}

// Of packed documents: a block a row of the table sums the rows of tokens at that place of their document, in order.
template <class T>
STRATA_KERNEL position_gradient_of_documents(const T* dx, const int32_t* documents, float* dp, int64_t rows,
                                             int64_t time, Indices at, int64_t columns) {
  const int64_t position = blockIdx.x;
  const int lane = int(threadIdx.x) % 32;
  dp += position * columns;
  for (int64_t base = 0; base < columns; base += kBlock * kEach) {
    const int64_t i = base + int64_t(threadIdx.x) * kEach;
    float sum[kEach], v[kEach];
    load(static_cast<const float*>(dp), i, columns, sum);
    for (int64_t r = 0; r < rows; r += 32) {
      const int64_t row = r + lane;
      unsigned same = __ballot_sync(0xFFFFFFFFu, row < rows && at(row % time) - documents[row] == position);
      for (; same; same &= same - 1) {
        load(dx + (r + __ffs(same) - 1) * columns, i, columns, v);
#pragma unroll
        for (int e = 0; e < kEach; ++e) sum[e] += v[e];
      }
    }
    store(dp, i, columns, sum);
  }
}

const Registration forward("embedding", [](const Binding& b) -> Launch {
  return with_type(b.input(1).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    return
        [=, tokens = b.in<int32_t>(0), w = b.in<T>(1), p = b.has_input(2) ? b.in<T>(2) : nullptr, x = b.out<T>(0),
         documents = b.has_input(3) ? b.in<int32_t>(3) : nullptr, rows = count(b.input(0)), time = b.input(0).shape[1],
         at = Indices(b.input(0), 1), columns = b.columns(1), own = OwnRows(b.input(1)), queue = b.queue()] {
          launch(embed<T>, dim3(unsigned(rows)), kBlock, 0, queue, tokens, w, p, x, time, at, documents, columns,
                 own.first, own.count);
        };
  });
});
const Registration backward("embedding_gradient", [](const Binding& b) -> Launch {
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    return
        [=, dx = b.in<T>(0), tokens = b.in<int32_t>(1), dw = b.out<float>(0), rows = b.rows(0), columns = b.columns(0),
         all = count(b.output(0)), own = OwnRows(b.output(0)), onto = b.accumulates(0), queue = b.queue()] {
          if (!onto) launch(clear, dim3(blocks(all, 256)), 256, 0, queue, dw, all);
          launch(embedding_gradient<T>, dim3(unsigned(rows)), kBlock, 0, queue, dx, tokens, dw, rows, columns,
                 own.first, own.count);
        };
  });
});
const Registration positions("position_gradient", [](const Binding& b) -> Launch {
  return with_type(b.input(0).dtype, [&](auto zero) -> Launch {
    using T = decltype(zero);
    return [=, dx = b.in<T>(0), dp = b.out<float>(0), s = b.input(0).shape, all = count(b.output(0)),
            documents = b.has_input(1) ? b.in<int32_t>(1) : nullptr, whole = b.input(0).full_shape()[1],
            at = Indices(b.input(0), 1), onto = b.accumulates(0), queue = b.queue()] {
      if (!onto) launch(clear, dim3(blocks(all, 256)), 256, 0, queue, dp, all);
      if (documents)
        return launch(position_gradient_of_documents<T>, dim3(unsigned(whole)), kBlock, 0, queue, dx, documents, dp,
                      s[0] * s[1], s[1], at, s[2]);
      launch(position_gradient<T>, dim3(unsigned(s[1])), kBlock, 0, queue, dx, dp, s[0], s[1], at, s[2]);
    };
  });
});

}  // namespace
}  // namespace strata::cuda::embedding_kernels
