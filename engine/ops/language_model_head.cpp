// The output layer and its cross-entropy in one op: logits exist for a chunk of rows at a time, never for all tokens.
// In training the loss and its gradients come from one pass, so that the logits are computed once.
#include <cmath>
#include <cstring>

#include "engine/ops/language_model_head.h"
#include "engine/ops/vector.h"

namespace strata {
namespace {

using simd::F;
using simd::get;
using simd::put;

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

STRATA_SIMD void cap_all(float* x, float cap, int64_t n) {
  simd::map(n,
            [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { put(x + i, cap * simd::tanh(get(x + i, c) / cap), c); });
}
STRATA_SIMD void capped_slopes(float* x, int64_t n, float scale, float cap, float lse) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
    const F score = get(x + i, c), share = score / cap;
    put(x + i, scale * simd::exp(score - lse) * (1.0f - share * share), c);
  });
}

double loss_of_row(float* logits, int64_t n, int64_t target, float scale, bool gradient, float cap) {
  if (cap == 0) return row_loss(logits, n, target, scale, gradient);
  head::cap_row(logits, cap, n);
  const double loss = row_loss(logits, n, target, scale, false);
  if (gradient) head::capped_gradient(logits, n, target, scale, cap, loss + double(logits[target]));
  return loss;
}

// Input 3, where there is one: the gradient of the loss, a scalar that loss scaling sets.
void loss_on_cpu(const Binding& b, bool gradient, const head::Products* full, const head::Products* last) {
  const int64_t vocabulary = b.input(1).shape[0];
  const int32_t* targets = b.in<int32_t>(2);
  const float scale = float(b.attributes().real("scale") * (b.has_input(3) ? *b.in<double>(3) : 1)),
              cap = head::cap_of(b);
  const double total = head::run_chunks(b, gradient, full, last, [&](int64_t row, float* logits) -> double {
    if (targets[row] >= 0) return loss_of_row(logits, vocabulary, targets[row], scale, gradient, cap);
    if (gradient) std::memset(logits, 0, size_t(vocabulary) * 4);
    return 0;
  });
  *b.out<float>(0) = float(total * b.attributes().real("scale"));
}

Kernel head_kernel(bool gradient) {
  return head::chunked_kernel(gradient,
                              [gradient](const Binding& b, const head::Products* full, const head::Products* last) {
                                loss_on_cpu(b, gradient, full, last);
                              });
}

template <class T>
void reference_loss(const Binding& b, bool gradient) {
  const int64_t rows = b.rows(0), hidden = b.columns(0), vocabulary = b.input(1).shape[0];
  const double scale = b.attributes().real("scale"), upstream = b.has_input(3) ? *b.in<double>(3) : 1,
               cap = b.attributes().real("soft_cap", 0.0);
  if (gradient && !b.accumulates(1)) std::fill_n(b.out<T>(1), rows * hidden, T(0));
  const bool of_weight = gradient && head::has_weight_gradient(b);
  if (of_weight && !b.accumulates(2)) std::fill_n(b.out<T>(2), vocabulary * hidden, T(0));
  double total = 0;
  std::vector<double> p(static_cast<size_t>(vocabulary)), bent(p.size());
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t target = b.in<int32_t>(2)[r];
    if (target < 0) continue;
    double top = -1e300, sum = 0;
    for (int64_t v = 0; v < vocabulary; ++v) {
      p[v] = 0;
      for (int64_t i = 0; i < hidden; ++i)
        p[v] += double(b.in<T>(0)[r * hidden + i]) * double(b.in<T>(1)[v * hidden + i]);
      if (cap > 0) p[v] = cap * (bent[v] = std::tanh(p[v] / cap));
      top = std::max(top, p[v]);
    }
    const double at_target = p[target] - top;
    for (double& value : p) sum += value = std::exp(value - top);
    total += std::log(sum) - at_target;
    for (int64_t v = 0; gradient && v < vocabulary; ++v) {
      const double d = upstream * scale * (p[v] / sum - (v == target)) * (1 - bent[v] * bent[v]);
      for (int64_t i = 0; i < hidden; ++i) {
        b.out<T>(1)[r * hidden + i] += T(d * double(b.in<T>(1)[v * hidden + i]));
        if (of_weight) b.out<T>(2)[v * hidden + i] += T(d * double(b.in<T>(0)[r * hidden + i]));
      }
    }
  }
  *b.out<T>(0) = T(total * scale);
}

void check(const OpView& v) {
  require(head::fits(v) && (v.inputs() == 3 || (v.inputs() == 4 && v.has_input(3) && is_scalar(v.input(3)))) &&
              v.attributes().has("scale"),
          v, "x (B, T, C), w (V, C), targets i32 (B, T) and an attribute scale");
}

// Where an axis splits the vocabulary (vocabulary_loss.cpp): the maximum, then the sums are exchanged, logits never.
std::vector<TensorId> over_parts_of_vocabulary(Builder& build, const OpView& v, const std::string& axis, int size) {
  const std::vector<TensorId> inputs = v.op().inputs;
  Attributes attributes = v.attributes(), caps;
  if (attributes.has("soft_cap")) caps.set("soft_cap", attributes.real("soft_cap"));
  const auto own = build.emit_all("vocabulary_statistics", inputs, caps, {}, "loss.statistics");
  const TensorId maximum =
      build.emit("all_reduce", {own[0]}, {{"axis", axis}, {"reduction", std::string("max")}}, "loss.maximum");
  const TensorId sum = build.emit("rescaled_sum", {own[1], own[0], maximum}, {}, "loss.own_sum");
  const auto sums =
      build.emit_all("all_reduce", {sum, own[2]}, {{"axis", axis}, {"reduction", std::string("sum")}}, {}, "loss.sums");
  (void)size;
  return {build.emit("vocabulary_loss", {inputs[0], inputs[1], inputs[2], maximum, sums[0], sums[1]}, attributes,
                     "loss.whole")};
}

}  // namespace

void head::cap_row(float* logits, float cap, int64_t n) { cap_all(logits, cap, n); }
void head::capped_gradient(float* logits, int64_t n, int64_t target, float scale, float cap, double lse) {
  const float at_target = target < 0 ? 0 : logits[target], share = at_target / cap;
  capped_slopes(logits, n, scale, cap, float(lse));
  if (target >= 0) logits[target] -= scale * (1 - share * share);
}

namespace {

const AtLoad language_model_head_registered([] {
  register_kind(
      {.name = "lm_head_loss",
       .summary = "x (B, T, C), w (V, C), targets i32 (B, T) -> loss (1) = scale·Σ cross-entropy; targets below 0 do "
                  "not count; with soft_cap of logits cap·tanh(logit / cap)",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         check(v);
         return {{{1}, wide(v.input(0).dtype)}};
       },
       .gradient = [](Differentiation& d) { head::gradients(d, "lm_head_loss"); },
       .cost = [](const OpView& v) { return head::cost(v, 1); },
       .half = true,
       .sharding =
           {.dimensions = "...c, vc, ... -> _", .whole = "c", .replaced = "v", .replace = over_parts_of_vocabulary},
       .kernels = {{"cpu", head_kernel(false)}, {"reference", reference_kernel([](const Binding& b, auto zero) {
                                                   reference_loss<decltype(zero)>(b, false);
                                                 })}}});
  head::register_with_gradients(
      {.name = {},
       .summary = "x, w, targets, [dloss f64 (1)]",
       .cost = [](const OpView& v) { return head::cost(v, head::has_weight_gradient(v) ? 3 : 2); },
       .half = true,
       .sharding = {.dimensions = "...c, vc, ..., _", .whole = "cv"},
       .kernels = {{"cpu", head_kernel(true)}, {"reference", reference_kernel([](const Binding& b, auto zero) {
                                                  reference_loss<decltype(zero)>(b, true);
                                                })}}},
      "lm_head_loss", [](const OpView& v) -> std::vector<TensorSpec> {
        check(v);
        return {{{1}, wide(v.input(0).dtype)}};
      });
});

}  // namespace
}  // namespace strata
