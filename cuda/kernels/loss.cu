// The output layer with its cross-entropy: logits of a few rows at a time, turned into their gradient where they lie,
// or with 16 bits beside that of rows before. Where an axis splits the vocabulary, what ranks exchange of each row
// instead (engine/ops/vocabulary_loss.cpp).
#include <map>
#include <memory>

#include "cuda/bind.h"
#include "cuda/gemm.h"
#include "strata/layout.h"

namespace strata::cuda::loss_kernels {
namespace {

// One block a multiprocessor, so that the rows that all of them have stay in the GPU's cache until they are read again:
// a fifth less time on an H100 than two of half the size.
constexpr int kBlock = 1024, kEach = 4;
constexpr int kAhead = 4;  // accesses of a thread that are under way at once

// Reads kAhead accesses of a thread at a time and calls body(first of an access, its numbers); those beyond the
// vocabulary are `otherwise`. Rows lie at multiples of 16 numbers, so that accesses are whole.
template <class Body>
STRATA_DEVICE void over_row(const float* x, int64_t vocabulary, float otherwise, Body body) {
  for (int64_t first = int64_t(threadIdx.x) * kEach; first < vocabulary; first += kBlock * kEach * kAhead) {
    Pack<float> v[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      if (const int64_t i = first + a * kBlock * kEach; i < vocabulary)
        v[a] = *reinterpret_cast<const Pack<float>*>(x + i);
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int64_t i = first + a * kBlock * kEach;
      if (i >= vocabulary) break;
#pragma unroll
      for (int e = 1; e < kEach; ++e)
        if (i + e >= vocabulary) v[a].value[e] = otherwise;
      body(i, v[a].value);
    }
  }
}

// Of a row of logits, by the threads of a block: the largest, and the sum of exponentials below it.
struct Exponentials {
  float top, sum;
};
STRATA_DEVICE Exponentials exponentials(const float* x, int64_t vocabulary, float* scratch) {
  float top = -3.0e38f, sum = 0;  // of what this thread has seen: Σ exp(x - top)
  over_row(x, vocabulary, bits_to_float(0xFF800000u), [&](int64_t, const float(&v)[kEach]) {
    float highest = top;
#pragma unroll
    for (int e = 0; e < kEach; ++e) highest = v[e] > highest ? v[e] : highest;
    sum *= __expf(top - highest);
    top = highest;
#pragma unroll
    for (int e = 0; e < kEach; ++e) sum += __expf(v[e] - top);  // NaN stays
  });
  const float highest = block_max(top, scratch);
  return {highest, block_sum(sum * __expf(top - highest), scratch)};
}

// Logits x of rows become cap·tanh(x / cap).
STRATA_KERNEL cap_logits(float* logits, int64_t vocabulary, int64_t stride, float cap) {
  float* const x = logits + int64_t(blockIdx.x) * stride;
  for (int64_t i = threadIdx.x; i < vocabulary; i += 256) x[i] = cap * tanhf(x[i] / cap);
}

// Four numbers in one access.
template <class T>
STRATA_DEVICE void store_pack(T* to, const float (&v)[kEach]) {
  struct alignas(kEach * sizeof(T)) Four {
    T value[kEach];
  } four;
#pragma unroll
  for (int e = 0; e < kEach; ++e) four.value[e] = from_float<T>(v[e]);
  *reinterpret_cast<Four*>(to) = four;
}

// factor·(exp(x - top)/sum - onehot) of a row, and where logits are capped times the cap's slope. One division a row.
template <class T>
STRATA_DEVICE void slopes_of(const float* x, T* gradient, int64_t vocabulary, int64_t target, float factor, float top,
                             float sum, float cap) {
  const float share = factor / sum, bent = cap > 0 ? 1 / cap : 0.0f;
  over_row(x, vocabulary, 0.0f, [&](int64_t i, const float(&v)[kEach]) {
    float slope[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) slope[e] = share * __expf(v[e] - top);
    if (target >= i && target < i + kEach)
#pragma unroll
      for (int e = 0; e < kEach; ++e) slope[e] -= i + e == target ? factor : 0.0f;
    if (cap > 0)
#pragma unroll
      for (int e = 0; e < kEach; ++e) slope[e] *= 1 - v[e] * bent * (v[e] * bent);
    if (i + kEach <= vocabulary) {
      store_pack(gradient + i, slope);
    } else {
#pragma unroll
      for (int e = 0; e < kEach; ++e)
        if (i + e < vocabulary) gradient[i + e] = from_float<T>(slope[e]);
    }
  });
}

// A block a row: -log softmax(logits)[target] into losses, scale·upstream·(softmax - onehot) into gradient.
template <class T>
STRATA_KERNEL __launch_bounds__(kBlock)
    row_loss(const float* logits, T* gradient, const int32_t* targets, double* losses, int64_t vocabulary,
             int64_t stride, float scale, const double* upstream, float cap) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  const float* x = logits + row * stride;
  const int32_t target = targets[row];
  const Exponentials of = exponentials(x, vocabulary, scratch);
  if (threadIdx.x == 0) losses[row] = target < 0 ? 0.0 : log(double(of.sum)) - (double(x[target]) - double(of.top));
  __syncthreads();  // gradient may be where the logits are
  if (!gradient) return;
  const float factor = target < 0 ? 0.0f : float(double(scale) * (upstream ? *upstream : 1.0));
  slopes_of(x, gradient + row * stride, vocabulary, target, factor, of.top, of.sum, cap);
}

// The same of ranks that each have rows of the vocabulary, this one from `first` on: what they exchange, …
STRATA_KERNEL __launch_bounds__(kBlock)
    row_statistics(const float* logits, const int32_t* targets, float* maximum, float* sums, float* at_target,
                   int64_t first, int64_t vocabulary, int64_t stride) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x, target = targets[row] < 0 ? -1 : targets[row] - first;
  const float* x = logits + row * stride;
  const Exponentials of = exponentials(x, vocabulary, scratch);
  if (threadIdx.x > 0) return;
  maximum[row] = of.top;
  sums[row] = of.sum;
  at_target[row] = target >= 0 && target < vocabulary ? x[target] : 0.0f;
}

// … and with that of all of them, gradients …
template <class T>
STRATA_KERNEL __launch_bounds__(kBlock)
    row_gradient(const float* logits, T* gradient, const int32_t* targets, const float* maximum, const float* sums,
                 int64_t first, int64_t vocabulary, int64_t stride, float scale, const double* upstream, float cap) {
  const int64_t row = blockIdx.x;
  const float factor = targets[row] < 0 ? 0.0f : float(double(scale) * (upstream ? *upstream : 1.0));
  slopes_of(logits + row * stride, gradient + row * stride, vocabulary, targets[row] - first, factor, maximum[row],
            sums[row], cap);
}

// … and losses.
STRATA_KERNEL losses_of(const int32_t* targets, const float* maximum, const float* sums, const float* at_target,
                        double* losses, int64_t rows) {
  const int64_t row = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (row < rows)
    losses[row] = targets[row] < 0 ? 0.0 : log(double(sums[row])) + double(maximum[row]) - double(at_target[row]);
}

STRATA_KERNEL total(const double* losses, int64_t rows, double scale, float* loss) {
  __shared__ double lanes[256];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < rows; i += 256) sum += losses[i];
  lanes[threadIdx.x] = sum;
  __syncthreads();
  for (int width = 128; width > 0; width /= 2) {
    if (int(threadIdx.x) < width) lanes[threadIdx.x] += lanes[threadIdx.x + width];
    __syncthreads();
  }
  if (threadIdx.x == 0) *loss = float(lanes[0] * scale);
}

// The workspace: logits of a part in f32, the gradient of those of a chunk where it has 16 bits, losses of all rows,
// room for products. The gradient of the weight is read and written once a chunk: of R rows that takes 300 / R of the
// time of the products on an H100, so chunks are large, and parts large enough for their product.
#ifdef STRATA_EMULATE  // so little that tests have several
constexpr int64_t kChunk = 1 << 20, kPart = 1 << 19, kPartRows = 128;
#else
constexpr int64_t kChunk = 256 << 20, kPart = 128 << 20, kPartRows = 384;  // bytes, and rows at least
#endif
struct Sizes {
  int64_t rows, hidden, vocabulary, stride;
  int64_t chunk, part;  // rows whose gradient is there at once, and of these rows with logits
  DType type;
  explicit Sizes(const OpView& v)
      : rows(v.rows(0)),
        hidden(v.columns(0)),
        vocabulary(v.input(1).shape[0]),
        stride((vocabulary + 15) / 16 * 16),
        type(v.input(0).dtype) {
    const int64_t of_part = half() ? std::max(kPartRows, kPart / (stride * 4) / 128 * 128) : 128;
    chunk = std::min(rows, std::max<int64_t>(1, kChunk / (stride * size_of(type)) / of_part) * of_part);
    part = half() ? std::min(rows, of_part) : chunk;
  }
  bool half() const { return is_half(type); }
  int64_t gradient_at() const { return part * stride * 4; }
  int64_t losses_at() const { return gradient_at() + (half() ? chunk * stride * 2 : 0); }
  int64_t product_at() const { return losses_at() + (rows * 8 + 255) / 256 * 256; }
  int64_t workspace() const { return product_at() + Gemm::workspace(); }
};

float cap_of(const OpView& v) { return float(v.attributes().real("soft_cap", 0.0)); }

// Chunk by chunk, and of each part by part: of_rows(first row, rows, logits, their gradient, losses, queue) looks at
// logits and where there are gradients makes theirs; then end(losses, queue). dx is output 1, dw 2 where there is one.
template <class OfRows, class End>
Launch bind_chunks(const Binding& b, bool gradient, OfRows of_rows, End end) {
  const Sizes s(b);
  const bool of_weight = b.outputs() > 2;  // which is not frozen
  char* const base = b.workspace<char>();
  auto* const logits = reinterpret_cast<float*>(base);
  void* const slopes = s.half() ? static_cast<void*>(base + s.gradient_at()) : logits;
  auto* const losses = reinterpret_cast<double*>(base + s.losses_at());
  void* const room = base + s.product_at();
  const void *const x = b.in<void>(0), *const w = b.in<void>(1);
  const auto make = [room](const GemmShape& shape, const void* A, const void* B, void* C) {
    return std::make_shared<Gemm>(shape, GemmMemory{A, B, C, room});
  };
  struct Products {  // of chunks of one size
    std::shared_ptr<Gemm> dx, dw_first, dw;
  };
  std::map<int64_t, std::shared_ptr<Gemm>> logits_of;  // by the rows of a part
  std::map<int64_t, Products> of_chunk;                // by those of a chunk
  // Calls part(row, rows, where in the chunk) for those of a chunk and then chunk(row, rows).
  const auto each_part = [s](auto part, auto chunk) {
    for (int64_t row = 0; row < s.rows; row += s.chunk) {
      const int64_t rows = std::min(s.chunk, s.rows - row);
      for (int64_t at = 0; at < rows; at += s.part) part(row + at, std::min(s.part, rows - at), at);
      chunk(row, rows);
    }
  };
  each_part(
      [&](int64_t, int64_t m, int64_t) {
        std::shared_ptr<Gemm>& product = logits_of[m];
        if (!product)
          product = make({false, true, m, s.vocabulary, s.hidden, s.hidden, s.hidden, s.stride, s.type, DType::f32}, x,
                         w, logits);
      },
      [&](int64_t, int64_t m) {
        if (!gradient || of_chunk.contains(m)) return;
        Products& p = of_chunk[m];
        p.dx = make({false, false, m, s.hidden, s.vocabulary, s.stride, s.hidden, s.hidden, s.type, s.type, false,
                     b.accumulates(1)},
                    slopes, w, b.out<void>(1));
        if (!of_weight) return;
        const auto dw = [&](bool onto) {
          return make(
              {true, false, s.vocabulary, s.hidden, m, s.stride, s.hidden, s.hidden, s.type, DType::f32, false, onto},
              slopes, x, b.out<void>(2));
        };
        p.dw_first = dw(b.accumulates(2));
        p.dw = dw(true);
      });
  return [=, dx = gradient ? b.out<void>(1) : nullptr, dw = of_weight ? b.out<void>(2) : nullptr, queue = b.queue(),
          cap = cap_of(b)] {
    each_part(
        [&](int64_t row, int64_t m, int64_t in_chunk) {
          logits_of.at(m)->run({at(x, s.type, row * s.hidden), w, logits, room}, queue);
          if (cap > 0) launch(cap_logits, dim3(unsigned(m)), 256, 0, queue, logits, s.vocabulary, s.stride, cap);
          of_rows(row, m, logits, at(slopes, s.type, in_chunk * s.stride), losses, queue);
        },
        [&](int64_t row, int64_t m) {
          if (!gradient) return;
          const Products& p = of_chunk.at(m);
          p.dx->run({slopes, w, at(dx, s.type, row * s.hidden), room}, queue);
          if (of_weight) (row > 0 ? p.dw : p.dw_first)->run({slopes, at(x, s.type, row * s.hidden), dw, room}, queue);
        });
    end(losses, queue);
  };
}

// The sum of the rows' losses.
auto summed(const Binding& b) {
  return [rows = b.rows(0), scale = b.attributes().real("scale"), loss = b.out<float>(0)](
             const double* losses, void* queue) { launch(total, dim3(1), 256, 0, queue, losses, rows, scale, loss); };
}

Launch bind_loss(const Binding& b, bool gradient) {
  const auto of_rows = [=, s = Sizes(b), targets = b.in<int32_t>(2), scale = float(b.attributes().real("scale")),
                        upstream = b.has_input(3) ? b.in<double>(3) : nullptr, cap = cap_of(b)](
                           int64_t row, int64_t m, const float* logits, void* slopes, double* losses, void* queue) {
    with_type(s.type, [&](auto zero) {
      using T = decltype(zero);
      launch(row_loss<T>, dim3(unsigned(m)), kBlock, 0, queue, logits, gradient ? static_cast<T*>(slopes) : nullptr,
             targets + row, losses + row, s.vocabulary, s.stride, scale, upstream, cap);
    });
  };
  return bind_chunks(b, gradient, of_rows, summed(b));
}

int64_t first_row(const Binding& b) { return box_of(b.input(1)).offset[0]; }

Launch bind_statistics(const Binding& b) {
  const auto of_rows = [s = Sizes(b), targets = b.in<int32_t>(2), maximum = b.out<float>(0), sums = b.out<float>(1),
                        at_target = b.out<float>(2), first = first_row(b)](int64_t row, int64_t m, const float* logits,
                                                                           void*, double*, void* queue) {
    launch(row_statistics, dim3(unsigned(m)), kBlock, 0, queue, logits, targets + row, maximum + row, sums + row,
           at_target + row, first, s.vocabulary, s.stride);
  };
  return bind_chunks(b, false, of_rows, [](const double*, void*) {});
}

// Losses of all rows by what ranks have exchanged of them.
auto losses_by_parts(const Binding& b) {
  return [rows = b.rows(0), targets = b.in<int32_t>(2), maximum = b.in<float>(3), sums = b.in<float>(4),
          at_target = b.in<float>(5), sum = summed(b)](double* losses, void* queue) {
    launch(losses_of, dim3(blocks(rows, 256)), 256, 0, queue, targets, maximum, sums, at_target, losses, rows);
    sum(losses, queue);
  };
}

Launch bind_parts_with_gradient(const Binding& b) {
  const auto of_rows = [s = Sizes(b), targets = b.in<int32_t>(2), maximum = b.in<float>(3), sums = b.in<float>(4),
                        first = first_row(b), scale = float(b.attributes().real("scale")),
                        upstream = b.has_input(6) ? b.in<double>(6) : nullptr, cap = cap_of(b)](
                           int64_t row, int64_t m, const float* logits, void* slopes, double*, void* queue) {
    with_type(s.type, [&](auto zero) {
      using T = decltype(zero);
      launch(row_gradient<T>, dim3(unsigned(m)), kBlock, 0, queue, logits, static_cast<T*>(slopes), targets + row,
             maximum + row, sums + row, first, s.vocabulary, s.stride, scale, upstream, cap);
    });
  };
  return bind_chunks(b, true, of_rows, losses_by_parts(b));
}
int64_t workspace(const OpView& v, int) { return Sizes(v).workspace(); }

const Registration parts[] = {{"vocabulary_statistics", bind_statistics, workspace},
                              {"vocabulary_loss",
                               [](const Binding& b) -> Launch {
                                 return [end = losses_by_parts(b), losses = b.workspace<double>(), queue = b.queue()] {
                                   end(losses, queue);
                                 };
                               },
                               [](const OpView& v, int) -> int64_t { return v.rows(0) * 8; }},
                              {"vocabulary_loss_with_gradient", bind_parts_with_gradient, workspace},
                              {"vocabulary_loss_with_input_gradient", bind_parts_with_gradient, workspace}};

const Registration kinds[] = {
    {"lm_head_loss", [](const Binding& b) { return bind_loss(b, false); }, workspace},
    {"lm_head_loss_with_gradient", [](const Binding& b) { return bind_loss(b, true); }, workspace},
    {"lm_head_loss_with_input_gradient", [](const Binding& b) { return bind_loss(b, true); }, workspace}};

}  // namespace
}  // namespace strata::cuda::loss_kernels
