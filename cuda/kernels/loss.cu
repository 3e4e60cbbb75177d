// The output layer with its cross-entropy: logits of a chunk of rows at a time, turned into their gradient where they
// lie.
#include <memory>

#include "cuda/bind.h"
#include "cuda/gemm.h"

namespace strata::cuda::loss_kernels {
namespace {

constexpr int kBlock = 1024, kEach = 4;

// A block a row: -log softmax(logits)[target] into losses, scale·upstream·(softmax - onehot) into gradient.
template <class T>
STRATA_KERNEL __launch_bounds__(kBlock)
    row_loss(const float* logits, T* gradient, const int32_t* targets, double* losses, int64_t vocabulary,
             int64_t stride, float scale, const double* upstream) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.x;
  const float* x = logits + row * stride;
  const int32_t target = targets[row];
  float top = -3.0e38f, sum = 0, v[kEach];  // of what this thread has seen: Σ exp(x - top)
  for (int64_t i = int64_t(threadIdx.x) * kEach; i < vocabulary; i += kBlock * kEach) {
    load(x, i, vocabulary, v);
    float highest = top;
#pragma unroll
    for (int e = 0; e < kEach; ++e)
      if (i + e < vocabulary) highest = v[e] > highest ? v[e] : highest;
    sum *= __expf(top - highest);
    top = highest;
#pragma unroll
    for (int e = 0; e < kEach; ++e)
      if (i + e < vocabulary) sum += __expf(v[e] - top);  // NaN stays
  }
  const float highest = block_max(top, scratch);
  sum = block_sum(sum * __expf(top - highest), scratch);
  top = highest;
  if (threadIdx.x == 0) losses[row] = target < 0 ? 0.0 : log(double(sum)) - (double(x[target]) - double(top));
  __syncthreads();  // gradient may be where the logits are
  if (!gradient) return;
  const float factor = target < 0 ? 0.0f : float(double(scale) * (upstream ? *upstream : 1.0));
  for (int64_t i = int64_t(threadIdx.x) * kEach; i < vocabulary; i += kBlock * kEach) {
    load(x, i, vocabulary, v);
#pragma unroll
    for (int e = 0; e < kEach; ++e) v[e] = factor * (__expf(v[e] - top) / sum - (i + e == target ? 1.0f : 0.0f));
    store(gradient + row * stride, i, vocabulary, v);
  }
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

// The workspace: logits of a chunk in f32, their gradient where it has 16 bits, losses of all rows, room for products.
struct Sizes {
  int64_t rows, hidden, vocabulary, stride, chunk;
  DType type;
  explicit Sizes(const OpView& v)
      : rows(v.rows(0)),
        hidden(v.columns(0)),
        vocabulary(v.input(1).shape[0]),
        stride((vocabulary + 15) / 16 * 16),
        chunk(std::min<int64_t>(rows, std::max<int64_t>(128, (256 << 20) / (stride * 4) / 128 * 128))),
        type(v.input(0).dtype) {}
  bool half() const { return is_half(type); }
  int64_t gradient_at() const { return chunk * stride * 4; }
  int64_t losses_at() const { return gradient_at() + (half() ? chunk * stride * 2 : 0); }
  int64_t product_at() const { return losses_at() + (rows * 8 + 255) / 256 * 256; }
  int64_t workspace() const { return product_at() + Gemm::workspace(); }
};

struct Products {
  std::unique_ptr<Gemm> logits, dx, dw_first, dw;
};

Launch bind_loss(const Binding& b, bool gradient) {
  const Sizes s(b);
  char* const base = b.workspace<char>();
  auto* const logits = reinterpret_cast<float*>(base);
  void* const slopes = s.half() ? static_cast<void*>(base + s.gradient_at()) : logits;
  auto* const losses = reinterpret_cast<double*>(base + s.losses_at());
  void* const room = base + s.product_at();
  const auto prepare = [&](int64_t m) {
    auto p = std::make_shared<Products>();
    const void *x = b.in<void>(0), *w = b.in<void>(1);
    const auto make = [&](const GemmShape& shape, const void* A, const void* B, void* C) {
      return std::make_unique<Gemm>(shape, GemmMemory{A, B, C, room});
    };
    p->logits =
        make({false, true, m, s.vocabulary, s.hidden, s.hidden, s.hidden, s.stride, s.type, DType::f32}, x, w, logits);
    if (!gradient) return p;
    p->dx = make({false, false, m, s.hidden, s.vocabulary, s.stride, s.hidden, s.hidden, s.type, s.type, false,
                  b.accumulates(1)},
                 slopes, w, b.out<void>(1));
    const auto dw = [&](bool onto) {
      return make(
          {true, false, s.vocabulary, s.hidden, m, s.stride, s.hidden, s.hidden, s.type, DType::f32, false, onto},
          slopes, x, b.out<void>(2));
    };
    p->dw_first = dw(b.accumulates(2));
    p->dw = dw(true);
    return p;
  };
  const auto full = prepare(s.chunk), last = s.rows % s.chunk ? prepare(s.rows % s.chunk) : full;
  const double scale = b.attributes().real("scale");
  return [=, queue = b.queue()] {
    const auto* targets = b.in<int32_t>(2);
    const double* upstream = b.has_input(3) ? b.in<double>(3) : nullptr;
    for (int64_t row = 0; row < s.rows; row += s.chunk) {
      const int64_t m = std::min(s.chunk, s.rows - row);
      const Products& p = m == s.chunk ? *full : *last;
      const void* x = at(b.in<void>(0), s.type, row * s.hidden);
      p.logits->run({x, b.in<void>(1), logits, room}, queue);
      with_type(s.type, [&](auto zero) {
        using T = decltype(zero);
        launch(row_loss<T>, dim3(unsigned(m)), kBlock, 0, queue, logits, gradient ? static_cast<T*>(slopes) : nullptr,
               targets + row, losses + row, s.vocabulary, s.stride, float(scale), upstream);
      });
      if (!gradient) continue;
      p.dx->run({slopes, b.in<void>(1), at(b.out<void>(1), s.type, row * s.hidden), room}, queue);
      (row > 0 ? p.dw : p.dw_first)->run({slopes, x, b.out<void>(2), room}, queue);
    }
    launch(total, dim3(1), 256, 0, queue, losses, s.rows, scale, b.out<float>(0));
  };
}
int64_t workspace(const OpView& v, int) { return Sizes(v).workspace(); }

const Registration kinds[] = {
    {"lm_head_loss", [](const Binding& b) { return bind_loss(b, false); }, workspace},
    {"lm_head_loss_with_gradient", [](const Binding& b) { return bind_loss(b, true); }, workspace}};

}  // namespace
}  // namespace strata::cuda::loss_kernels
