// The output layer and its cross-entropy in one op: logits exist for a chunk of rows at a time, never for all tokens.
// In training the loss and its gradients come from one pass, so that the logits are computed once.
#include <cmath>
#include <cstring>

#include "engine/ops/gemm.h"
#include "engine/ops/registration.h"
#include "engine/ops/vector.h"

namespace strata {
namespace {

using simd::F;
using simd::get;
using simd::put;

// Rows of logits held at once: about 50 MB, where the products are still at full speed.
int64_t chunk_rows(int64_t rows, int64_t vocabulary) {
  constexpr int64_t kLogits = 12'900'000;
  return std::min(rows, std::max<int64_t>(64, std::min<int64_t>(1024, kLogits / vocabulary / 64 * 64)));
}
int64_t row_stride(int64_t vocabulary) { return (vocabulary + 15) / 16 * 16; }

// -log softmax(logits)[target] of one row; turns the row into scale·(softmax - onehot) when asked.
STRATA_SIMD double row_loss(float* logits, int64_t n, int64_t target, float scale, bool gradient) {
  F highest = simd::set(-3.0e38f);
  int64_t i = 0;
  for (; i + simd::kLanes <= n; i += simd::kLanes) highest = simd::max(highest, simd::load(logits + i));
  float top = simd::max(highest);
  for (; i < n; ++i) top = logits[i] > top ? logits[i] : top;
  const float at_target = logits[target] - top;
  double total = 0;
  float rest = 0;
  for (i = 0; i + simd::kLanes <= n;) {  // lanes in float over 4096 elements, those sums in double
    F sum{};
    const int64_t stop = std::min(n - simd::kLanes + 1, i + 4096);
    for (; i < stop; i += simd::kLanes) {
      const F e = simd::exp(simd::load(logits + i) - top);
      if (gradient) simd::store(logits + i, e);
      sum += e;
    }
    total += double(simd::sum(sum));
  }
  if (i < n) {
    F e = simd::exp(simd::load(logits + i, n - i) - top);
    for (int64_t j = n - i; j < simd::kLanes; ++j) e[j] = 0;
    if (gradient) simd::store(logits + i, e, n - i);
    rest = simd::sum(e);
  }
  total += double(rest);
  if (gradient) {
    const float factor = float(double(scale) / total);
    simd::map(n, [&](int64_t j, int64_t c) STRATA_INLINE_LAMBDA { put(logits + j, get(logits + j, c) * factor, c); });
    logits[target] -= scale;
  }
  return std::log(total) - double(at_target);
}

struct Sizes {
  int64_t rows, hidden, vocabulary, chunk, stride;
  explicit Sizes(const OpView& v)
      : rows(v.rows(0)),
        hidden(v.columns(0)),
        vocabulary(v.input(1).shape[0]),
        chunk(chunk_rows(rows, vocabulary)),
        stride(row_stride(vocabulary)) {}
  int64_t loss_offset() const {
    return chunk * stride;
  }  // in floats; losses of the chunk's rows in double follow the logits
  int64_t workspace() const { return chunk * stride * 4 + chunk * 8; }
};

void loss_on_cpu(const Binding& b, bool gradient) {
  const Sizes s(b);
  float* logits = b.workspace<float>();
  double* losses = reinterpret_cast<double*>(logits + s.loss_offset());
  const float *x = b.in<float>(0), *w = b.in<float>(1);
  const int32_t* targets = b.in<int32_t>(2);
  const float scale = float(b.attributes().real("scale"));
  double total = 0;
  for (int64_t row = 0; row < s.rows; row += s.chunk) {
    const int64_t m = std::min(s.chunk, s.rows - row);
    gemm(b.threads(), Transpose::no, Transpose::yes, m, s.vocabulary, s.hidden, x + row * s.hidden, s.hidden, w,
         s.hidden, 0, logits, s.stride);
    b.threads().split(m, 1, [&](int64_t i, int64_t e) {
      for (; i < e; ++i) {
        const int64_t target = targets[row + i];
        losses[i] = 0;
        if (target >= 0)
          losses[i] = row_loss(logits + i * s.stride, s.vocabulary, target, scale, gradient);
        else if (gradient)
          std::memset(logits + i * s.stride, 0, size_t(s.vocabulary) * 4);
      }
    });
    for (int64_t i = 0; i < m; ++i) total += losses[i];
    if (!gradient) continue;
    gemm(b.threads(), Transpose::no, Transpose::no, m, s.hidden, s.vocabulary, logits, s.stride, w, s.hidden,
         b.accumulates(1) ? 1.0f : 0.0f, b.out<float>(1) + row * s.hidden, s.hidden);
    gemm(b.threads(), Transpose::yes, Transpose::no, s.vocabulary, s.hidden, m, logits, s.stride, x + row * s.hidden,
         s.hidden, row > 0 || b.accumulates(2) ? 1.0f : 0.0f, b.out<float>(2), s.hidden);
  }
  *b.out<float>(0) = float(total * b.attributes().real("scale"));
}

template <class T>
void reference_loss(const Binding& b, bool gradient) {
  const int64_t rows = b.rows(0), hidden = b.columns(0), vocabulary = b.input(1).shape[0];
  const double scale = b.attributes().real("scale");
  if (gradient && !b.accumulates(1)) std::fill_n(b.out<T>(1), rows * hidden, T(0));
  if (gradient && !b.accumulates(2)) std::fill_n(b.out<T>(2), vocabulary * hidden, T(0));
  double total = 0;
  std::vector<double> p(static_cast<size_t>(vocabulary));
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t target = b.in<int32_t>(2)[r];
    if (target < 0) continue;
    double top = -1e300, sum = 0;
    for (int64_t v = 0; v < vocabulary; ++v) {
      p[v] = 0;
      for (int64_t i = 0; i < hidden; ++i)
        p[v] += double(b.in<T>(0)[r * hidden + i]) * double(b.in<T>(1)[v * hidden + i]);
      top = std::max(top, p[v]);
    }
    const double at_target = p[target] - top;
    for (double& value : p) sum += value = std::exp(value - top);
    total += std::log(sum) - at_target;
    for (int64_t v = 0; gradient && v < vocabulary; ++v) {
      const double d = scale * (p[v] / sum - (v == target));
      for (int64_t i = 0; i < hidden; ++i) {
        b.out<T>(1)[r * hidden + i] += T(d * double(b.in<T>(1)[v * hidden + i]));
        b.out<T>(2)[v * hidden + i] += T(d * double(b.in<T>(0)[r * hidden + i]));
      }
    }
  }
  *b.out<T>(0) = T(total * scale);
}

void check(const OpView& v) {
  require(v.inputs() == 3 && v.has_input(0) && v.has_input(1) && v.has_input(2) && is_float(v.input(0)) &&
              is_float(v.input(1)) && v.input(1).shape.size() == 2 && v.columns(0) == v.columns(1) &&
              v.input(2).dtype == DType::i32 && elements(v.input(2).shape) == v.rows(0) && v.attributes().has("scale"),
          v, "x (B, T, C), w (V, C), targets i32 (B, T) and an attribute scale");
}
Cost head_cost(const OpView& v, double products) {
  const double size = double(size_of(v.input(0).dtype));
  return {2 * products * double(v.rows(0)) * double(v.columns(0)) * double(v.input(1).shape[0]),
          products * size * (double(elements(v.input(0).shape)) + double(elements(v.input(1).shape)))};
}
int64_t workspace(const OpView& v, int) { return Sizes(v).workspace(); }

const AtLoad registered([] {
  register_kind(
      {.name = "lm_head_loss",
       .summary = "x (B, T, C), w (V, C), targets i32 (B, T) -> loss (1) = scale·Σ cross-entropy; targets below 0 do "
                  "not count",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         check(v);
         return {{{1}, v.input(0).dtype}};
       },
       .gradient =
           [](Differentiation& d) {
             const auto out = d.build().emit_all("lm_head_loss_with_gradient", {d.input(0), d.input(1), d.input(2)},
                                                 d.forward().attributes(), {d.output(0), {}, {}});
             d.replaces_forward();
             d.set(0, out[1]);
             d.set(1, out[2]);
           },
       .cost = [](const OpView& v) { return head_cost(v, 1); },
       .kernels = {{"cpu", cpu_kernel([](const Binding& b) { loss_on_cpu(b, false); }, workspace)},
                   {"reference",
                    reference_kernel([](const Binding& b, auto zero) { reference_loss<decltype(zero)>(b, false); })}}});
  register_kind({.name = "lm_head_loss_with_gradient",
                 .summary = "x, w, targets -> loss (1), dx (B, T, C), dw (V, C)",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   check(v);
                   return {{{1}, v.input(0).dtype}, like(v.input(0)), like(v.input(1))};
                 },
                 .cost = [](const OpView& v) { return head_cost(v, 3); },
                 .accumulates = 6,
                 .kernels = {{"cpu", cpu_kernel([](const Binding& b) { loss_on_cpu(b, true); }, workspace)},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                reference_loss<decltype(zero)>(b, true);
                              })}}});
});

}  // namespace
}  // namespace strata
