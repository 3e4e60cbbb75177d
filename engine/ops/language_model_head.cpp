// The output layer and its cross-entropy in one op: logits exist for a chunk of rows at a time, never for all tokens.
// In training the loss and its gradients come from one pass, so that the logits are computed once.
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>

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
  DType type;
  explicit Sizes(const OpView& v)
      : rows(v.rows(0)),
        hidden(v.columns(0)),
        vocabulary(v.input(1).shape[0]),
        chunk(chunk_rows(rows, vocabulary)),
        stride(row_stride(vocabulary)),
        type(v.input(0).dtype) {}
  // The workspace: logits, losses of a chunk's rows in f64, and where the model has 16 bits the logits' gradient in
  // those, and what products need.
  int64_t losses_at() const { return chunk * stride * 4; }
  int64_t halves_at() const { return losses_at() + (chunk * 8 + 63) / 64 * 64; }
  int64_t product_at() const { return halves_at() + (is_half(type) ? (chunk * stride * 2 + 63) / 64 * 64 : 0); }
};

// The products of a chunk of `m` rows.
struct Shapes {
  HalfShape logits, dx, dw_first, dw;
  Shapes(const OpView& v, const Sizes& s, int64_t m)
      : logits{Transpose::no, Transpose::yes, m,        s.vocabulary, s.hidden,
               s.hidden,      s.hidden,       s.stride, s.type,       DType::f32},
        dx{Transpose::no, Transpose::no, m,      s.hidden, s.vocabulary, s.stride,
           s.hidden,      s.hidden,      s.type, s.type,   false,        v.accumulates(1)},
        dw_first{Transpose::yes, Transpose::no, s.vocabulary, s.hidden,   m,     s.stride,
                 s.hidden,       s.hidden,      s.type,       DType::f32, false, v.accumulates(2)},
        dw{dw_first} {
    dw.accumulate = true;
  }
};

struct Products {
  HalfGemm logits;
  std::optional<HalfGemm> dx, dw_first, dw;
  Products(const Binding& b, const Shapes& s, bool gradient) : logits(b.threads(), s.logits) {
    if (!gradient) return;
    dx.emplace(b.threads(), s.dx);
    dw_first.emplace(b.threads(), s.dw_first);
    dw.emplace(b.threads(), s.dw);
  }
};

int64_t workspace(const OpView& v, bool gradient, int threads) {
  const Sizes s(v);
  if (!is_half(s.type)) return s.product_at();
  int64_t most = 0;
  for (int64_t m : {s.chunk, s.rows % s.chunk}) {
    if (m == 0) continue;
    const Shapes shapes(v, s, m);
    most = std::max(most, HalfGemm::workspace(shapes.logits, threads));
    if (gradient)
      for (const HalfShape* shape : {&shapes.dx, &shapes.dw_first, &shapes.dw})
        most = std::max(most, HalfGemm::workspace(*shape, threads));
  }
  return s.product_at() + most;
}

// Input 3, where there is one: the gradient of the loss, a scalar that loss scaling sets.
void loss_on_cpu(const Binding& b, bool gradient, const Products* full, const Products* last) {
  const Sizes s(b);
  auto* const base = b.workspace<std::byte>();
  auto* logits = reinterpret_cast<float*>(base);
  auto* losses = reinterpret_cast<double*>(base + s.losses_at());
  void *const halves = base + s.halves_at(), *const scratch = base + s.product_at();
  const int32_t* targets = b.in<int32_t>(2);
  const float scale = float(b.attributes().real("scale") * (b.has_input(3) ? *b.in<double>(3) : 1));
  double total = 0;
  for (int64_t row = 0; row < s.rows; row += s.chunk) {
    const int64_t m = std::min(s.chunk, s.rows - row);
    const Products* products = m == s.chunk ? full : last;
    const void* x = at(b.in<void>(0), s.type, row * s.hidden);
    if (products)
      products->logits.run(x, b.in<void>(1), nullptr, logits, scratch);
    else
      gemm(b.threads(), Transpose::no, Transpose::yes, m, s.vocabulary, s.hidden, b.in<float>(0) + row * s.hidden,
           s.hidden, b.in<float>(1), s.hidden, 0, logits, s.stride);
    b.threads().split(m, 1, [&](int64_t i, int64_t e) {
      for (; i < e; ++i) {
        const int64_t target = targets[row + i];
        losses[i] = 0;
        if (target >= 0)
          losses[i] = row_loss(logits + i * s.stride, s.vocabulary, target, scale, gradient);
        else if (gradient)
          std::memset(logits + i * s.stride, 0, size_t(s.vocabulary) * 4);
        if (gradient && products)
          from_f32(s.type, logits + i * s.stride, at(halves, s.type, i * s.stride), s.vocabulary);
      }
    });
    for (int64_t i = 0; i < m; ++i) total += losses[i];
    if (!gradient) continue;
    if (products) {
      products->dx->run(halves, b.in<void>(1), nullptr, at(b.out<void>(1), s.type, row * s.hidden), scratch);
      (row > 0 ? products->dw : products->dw_first)->run(halves, x, nullptr, b.out<void>(2), scratch);
      continue;
    }
    gemm(b.threads(), Transpose::no, Transpose::no, m, s.hidden, s.vocabulary, logits, s.stride, b.in<float>(1),
         s.hidden, b.accumulates(1) ? 1.0f : 0.0f, b.out<float>(1) + row * s.hidden, s.hidden);
    gemm(b.threads(), Transpose::yes, Transpose::no, s.vocabulary, s.hidden, m, logits, s.stride,
         b.in<float>(0) + row * s.hidden, s.hidden, row > 0 || b.accumulates(2) ? 1.0f : 0.0f, b.out<float>(2),
         s.hidden);
  }
  *b.out<float>(0) = float(total * b.attributes().real("scale"));
}

Kernel head_kernel(bool gradient) {
  return {[=](const Binding& b) -> Launch {
            require(compute_type(b) != DType::f64, b, "f32, bf16 or f16 tensors on the cpu backend");
            const Sizes s(b);
            if (!is_half(s.type)) return [=] { loss_on_cpu(b, gradient, nullptr, nullptr); };
            const auto full = std::make_shared<Products>(b, Shapes(b, s, s.chunk), gradient);
            const int64_t rest = s.rows % s.chunk;
            const auto last = rest ? std::make_shared<Products>(b, Shapes(b, s, rest), gradient) : full;
            return [=] { loss_on_cpu(b, gradient, full.get(), last.get()); };
          },
          [=](const OpView& v, int threads) { return workspace(v, gradient, threads); }};
}

template <class T>
void reference_loss(const Binding& b, bool gradient) {
  const int64_t rows = b.rows(0), hidden = b.columns(0), vocabulary = b.input(1).shape[0];
  const double scale = b.attributes().real("scale"), upstream = b.has_input(3) ? *b.in<double>(3) : 1;
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
      const double d = upstream * scale * (p[v] / sum - (v == target));
      for (int64_t i = 0; i < hidden; ++i) {
        b.out<T>(1)[r * hidden + i] += T(d * double(b.in<T>(1)[v * hidden + i]));
        b.out<T>(2)[v * hidden + i] += T(d * double(b.in<T>(0)[r * hidden + i]));
      }
    }
  }
  *b.out<T>(0) = T(total * scale);
}

void check(const OpView& v) {
  require((v.inputs() == 3 || (v.inputs() == 4 && v.has_input(3) && is_scalar(v.input(3)))) && v.has_input(0) &&
              v.has_input(1) && v.has_input(2) && is_float(v.input(0)) && v.input(1).dtype == v.input(0).dtype &&
              v.input(1).shape.size() == 2 && v.columns(0) == v.columns(1) && v.input(2).dtype == DType::i32 &&
              elements(v.input(2).shape) == v.rows(0) && v.attributes().has("scale"),
          v, "x (B, T, C), w (V, C), targets i32 (B, T) and an attribute scale");
}
Cost head_cost(const OpView& v, double products) {
  const double size = double(size_of(v.input(0).dtype));
  return {2 * products * double(v.rows(0)) * double(v.columns(0)) * double(v.input(1).shape[0]),
          products * size * (double(elements(v.input(0).shape)) + double(elements(v.input(1).shape)))};
}
const AtLoad registered([] {
  register_kind(
      {.name = "lm_head_loss",
       .summary = "x (B, T, C), w (V, C), targets i32 (B, T) -> loss (1) = scale·Σ cross-entropy; targets below 0 do "
                  "not count",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         check(v);
         return {{{1}, wide(v.input(0).dtype)}};
       },
       .gradient =
           [](Differentiation& d) {
             std::vector<TensorId> inputs{d.input(0), d.input(1), d.input(2)};
             if (d.output_gradient(0)) inputs.push_back(d.output_gradient(0));
             const auto out = d.build().emit_all("lm_head_loss_with_gradient", inputs, d.forward().attributes(),
                                                 {d.output(0), {}, {}});
             d.replaces_forward();
             d.set(0, out[1]);
             d.set(1, out[2]);
           },
       .cost = [](const OpView& v) { return head_cost(v, 1); },
       .half = true,
       .kernels = {{"cpu", head_kernel(false)}, {"reference", reference_kernel([](const Binding& b, auto zero) {
                                                   reference_loss<decltype(zero)>(b, false);
                                                 })}}});
  register_kind(
      {.name = "lm_head_loss_with_gradient",
       .summary = "x, w, targets, [dloss f64 (1)] -> loss (1), dx (B, T, C), dw (V, C)",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         check(v);
         return {{{1}, wide(v.input(0).dtype)}, like(v.input(0)), {v.input(1).shape, wide(v.input(1).dtype)}};
       },
       .cost = [](const OpView& v) { return head_cost(v, 3); },
       .accumulates = 6,
       .half = true,
       .kernels = {{"cpu", head_kernel(true)}, {"reference", reference_kernel([](const Binding& b, auto zero) {
                                                  reference_loss<decltype(zero)>(b, true);
                                                })}}});
});

}  // namespace
}  // namespace strata
