// The output layer's cross-entropy where ranks of an axis each have rows of the vocabulary (Shoeybi et al., arXiv
// 1909.08053, section 3): of each token the largest logit, the sum of exponentials and the target's logit are combined
// over the ranks, logits never. What takes the place of lm_head_loss then (language_model_head.cpp):
//
//     vocabulary_statistics   x, w, targets -> this rank's maximum, sum of exp(logit - maximum), logit of the target
//     all_reduce              of the maximum
//     rescaled_sum            the sum as if it had been taken with the maximum of all
//     all_reduce              of the sum and of the target's logit
//     vocabulary_loss         -> the loss; in training with gradients, for which logits are computed again
#include <cmath>
#include <cstring>

#include "engine/ops/language_model_head.h"
#include "engine/ops/shares.h"
#include "engine/ops/vector.h"

namespace strata {
namespace {

using simd::F;
using simd::get;
using simd::put;

// Where a token's logit is on this rank, or -1: not here, or the token does not count.
struct OwnTargets {
  const int32_t* targets;
  int64_t first, count;
  explicit OwnTargets(const Binding& b)
      : targets(b.in<int32_t>(2)), first(first_row(b.input(1))), count(b.input(1).shape[0]) {}
  int64_t operator()(int64_t row) const {
    const int64_t at = targets[row] - first;
    return targets[row] >= 0 && at >= 0 && at < count ? at : -1;
  }
};

// exp(x - top) in place where asked; returns the sum, lanes in float over 4096 elements and those sums in double.
STRATA_SIMD double exponentials(float* x, int64_t n, float top, bool keep) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += 4096) {
    F sum{};
    simd::map(std::min<int64_t>(4096, n - begin), [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
      F e = simd::exp(get(x + begin + i, c) - top);
      for (int64_t l = c; l < simd::kLanes; ++l) e[l] = 0;
      if (keep) put(x + begin + i, e, c);
      sum += e;
    });
    total += double(simd::sum(sum));
  }
  return total;
}

STRATA_SIMD float largest(const float* x, int64_t n) {
  F highest = simd::set(-3.0e38f);
  int64_t i = 0;
  for (; i + simd::kLanes <= n; i += simd::kLanes) highest = simd::max(highest, simd::load(x + i));
  float top = simd::max(highest);
  for (; i < n; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

STRATA_SIMD void multiply(float* x, float factor, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { put(x + i, get(x + i, c) * factor, c); });
}

void statistics(const Binding& b, const head::Products* full, const head::Products* last) {
  const OwnTargets own(b);
  const int64_t vocabulary = b.input(1).shape[0];
  const float cap = head::cap_of(b);
  float *maximum = b.out<float>(0), *sum = b.out<float>(1), *at_target = b.out<float>(2);
  head::run_chunks(b, false, full, last, [&](int64_t row, float* logits) -> double {
    const int64_t target = own(row);
    if (cap > 0) head::cap_row(logits, cap, vocabulary);
    at_target[row] = target < 0 ? 0 : logits[target];
    maximum[row] = largest(logits, vocabulary);
    sum[row] = float(exponentials(logits, vocabulary, maximum[row], false));
    return 0;
  });
}

double loss_of(const Binding& b, int64_t row) {
  if (b.in<int32_t>(2)[row] < 0) return 0;
  return std::log(double(b.in<float>(4)[row])) + double(b.in<float>(3)[row]) - double(b.in<float>(5)[row]);
}

void loss(const Binding& b) {
  double total = 0;
  for (int64_t row = 0; row < b.rows(0); ++row) total += loss_of(b, row);
  *b.out<float>(0) = float(total * b.attributes().real("scale"));
}

void loss_with_gradient(const Binding& b, const head::Products* full, const head::Products* last) {
  const OwnTargets own(b);
  const int64_t vocabulary = b.input(1).shape[0];
  const float scale = float(b.attributes().real("scale") * (b.has_input(6) ? *b.in<double>(6) : 1)),
              cap = head::cap_of(b);
  const double total = head::run_chunks(b, true, full, last, [&](int64_t row, float* logits) -> double {
    if (own.targets[row] < 0) {
      std::memset(logits, 0, size_t(vocabulary) * 4);
      return 0;
    }
    if (cap > 0) {
      head::cap_row(logits, cap, vocabulary);
      head::capped_gradient(logits, vocabulary, own(row), scale, cap,
                            double(b.in<float>(3)[row]) + std::log(double(b.in<float>(4)[row])));
      return loss_of(b, row);
    }
    exponentials(logits, vocabulary, b.in<float>(3)[row], true);
    multiply(logits, float(double(scale) / double(b.in<float>(4)[row])), vocabulary);
    if (const int64_t target = own(row); target >= 0) logits[target] -= scale;
    return loss_of(b, row);
  });
  *b.out<float>(0) = float(total * b.attributes().real("scale"));
}

// One row's logits, plainly, capped where they are to be.
template <class T>
std::vector<double> logits_of(const Binding& b, int64_t row) {
  const int64_t hidden = b.columns(0);
  std::vector<double> logits(size_t(b.input(1).shape[0]), 0.0);
  for (size_t v = 0; v < logits.size(); ++v)
    for (int64_t i = 0; i < hidden; ++i)
      logits[v] += double(b.in<T>(0)[row * hidden + i]) * double(b.in<T>(1)[int64_t(v) * hidden + i]);
  if (const double cap = b.attributes().real("soft_cap", 0.0); cap > 0)
    for (double& logit : logits) logit = cap * std::tanh(logit / cap);
  return logits;
}

template <class T>
void reference_statistics(const Binding& b) {
  const OwnTargets own(b);
  for (int64_t row = 0; row < b.rows(0); ++row) {
    const std::vector<double> logits = logits_of<T>(b, row);
    const double top = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (double value : logits) sum += std::exp(value - top);
    b.out<T>(0)[row] = T(top);
    b.out<T>(1)[row] = T(sum);
    b.out<T>(2)[row] = own(row) < 0 ? T(0) : T(logits[size_t(own(row))]);
  }
}

template <class T>
void reference_loss(const Binding& b, bool gradient) {
  const OwnTargets own(b);
  const int64_t hidden = b.columns(0);
  const double scale = b.attributes().real("scale"), upstream = b.has_input(6) ? *b.in<double>(6) : 1,
               cap = b.attributes().real("soft_cap", 0.0);
  if (gradient && !b.accumulates(1)) std::fill_n(b.out<T>(1), elements(b.output(1).shape), T(0));
  const bool of_weight = gradient && head::has_weight_gradient(b);
  if (of_weight && !b.accumulates(2)) std::fill_n(b.out<T>(2), elements(b.output(2).shape), T(0));
  double total = 0;
  for (int64_t row = 0; row < b.rows(0); ++row) {
    if (own.targets[row] < 0) continue;
    const double top = double(b.in<T>(3)[row]), sum = double(b.in<T>(4)[row]);
    total += std::log(sum) + top - double(b.in<T>(5)[row]);
    if (!gradient) continue;
    const std::vector<double> logits = logits_of<T>(b, row);
    for (int64_t v = 0; v < int64_t(logits.size()); ++v) {
      const double share = cap > 0 ? logits[size_t(v)] / cap : 0;
      const double d =
          upstream * scale * (std::exp(logits[size_t(v)] - top) / sum - (v == own(row))) * (1 - share * share);
      for (int64_t i = 0; i < hidden; ++i) {
        b.out<T>(1)[row * hidden + i] += T(d * double(b.in<T>(1)[v * hidden + i]));
        if (of_weight) b.out<T>(2)[v * hidden + i] += T(d * double(b.in<T>(0)[row * hidden + i]));
      }
    }
  }
  *b.out<T>(0) = T(total * scale);
}

void check_loss(const OpView& v, bool gradient) {
  bool right = head::fits(v) && v.attributes().has("scale") &&
               (v.inputs() == 6 || (gradient && v.inputs() == 7 && v.has_input(6) && is_scalar(v.input(6))));
  for (int i = 3; right && i < 6; ++i)
    right = v.has_input(i) && v.input(i).shape == v.input(2).shape && v.input(i).dtype == wide(v.input(0).dtype);
  require(right, v, "x (B, T, C), w (V, C), targets i32 (B, T), three statistics (B, T) and an attribute scale");
}

void register_statistics() {
  register_kind({.name = "vocabulary_statistics",
                 .summary = "x (B, T, C), w (V, C), targets i32 (B, T) -> of each token the largest logit, the sum of "
                            "exponentials below it, and the target's logit or 0",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 3 && head::fits(v), v, "x (B, T, C), w (V, C) and targets i32 (B, T)");
                   const TensorSpec one{v.input(2).shape, wide(v.input(0).dtype)};
                   return {one, one, one};
                 },
                 // Only the loss has a gradient rule, which is that of all of these together.
                 .cost = [](const OpView& v) { return head::cost(v, 1); },
                 .half = true,
                 .sharding = {.dimensions = "...c, vc, ... -> ..., ..., ...", .whole = "c", .own = 3},
                 .kernels = {{"cpu", head::chunked_kernel(false, statistics)},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                reference_statistics<decltype(zero)>(b);
                              })}}});
  register_kind({.name = "rescaled_sum",
                 .summary = "a sum of exponentials below this rank's maximum, that, and the maximum of all -> the sum "
                            "below the maximum of all",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   bool right = v.inputs() == 3;
                   for (int i = 0; right && i < 3; ++i)
                     right = v.has_input(i) && v.input(i).shape == v.input(0).shape && is_float(v.input(i)) &&
                             !is_half(v.input(i).dtype) && v.input(i).dtype == v.input(0).dtype;
                   require(right, v, "three tensors of one shape, f32");
                   return {like(v.input(0))};
                 },
                 .in_place = {{0, 0}, {0, 1}},
                 .sharding = elementwise(3),
                 .kernels = {{"cpu", cpu_kernel([](const Binding& b) {
                                for (int64_t i = 0; i < elements(b.input(0).shape); ++i)
                                  b.out<float>(0)[i] =
                                      b.in<float>(0)[i] * std::exp(b.in<float>(1)[i] - b.in<float>(2)[i]);
                              })},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                using T = decltype(zero);
                                for (int64_t i = 0; i < elements(b.input(0).shape); ++i)
                                  b.out<T>(0)[i] = b.in<T>(0)[i] * std::exp(b.in<T>(1)[i] - b.in<T>(2)[i]);
                              })}}});
}

void register_loss() {
  register_kind(
      {.name = "vocabulary_loss",
       .summary = "x, w, targets, largest logits, sums, the targets' logits -> loss (1) = scale·Σ cross-entropy",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         check_loss(v, false);
         return {{{1}, wide(v.input(0).dtype)}};
       },
       .gradient = [](Differentiation& d) { head::gradients(d, "vocabulary_loss"); },
       .cost =
           [](const OpView& v) {
             return Cost{0, 16.0 * double(v.rows(0))};
           },
       .half = true,
       .sharding = {.dimensions = "...c, vc, ..., ..., ..., ... -> _", .whole = "c", .own = 1},
       .kernels = {{"cpu", cpu_kernel(loss)}, {"reference", reference_kernel([](const Binding& b, auto zero) {
                                                 reference_loss<decltype(zero)>(b, false);
                                               })}}});
  head::register_with_gradients(
      {.name = {},
       .summary = "x, w, targets, largest logits, sums, the targets' logits, [dloss f64 (1)]",
       // The logits' second product is work of this method, not of the model.
       .cost = [](const OpView& v) { return head::cost(v, head::has_weight_gradient(v) ? 2 : 1); },
       .half = true,
       .sharding = {.dimensions = "...c, vc, ..., ..., ..., ..., _", .whole = "c", .own = 1},
       .kernels = {{"cpu", head::chunked_kernel(true, loss_with_gradient)},
                   {"reference",
                    reference_kernel([](const Binding& b, auto zero) { reference_loss<decltype(zero)>(b, true); })}}},
      "vocabulary_loss", [](const OpView& v) -> std::vector<TensorSpec> {
        check_loss(v, true);
        return {{{1}, wide(v.input(0).dtype)}};
      });
}

const AtLoad vocabulary_loss_registered([] {
  register_statistics();
  register_loss();
});

}  // namespace
}  // namespace strata
