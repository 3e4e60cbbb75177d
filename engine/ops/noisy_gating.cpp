// Routing by chance, and what keeps its load even: jitter of a router's input (Fedus et al., arXiv 2101.03961), second
// experts by chance (Lepikhin et al., arXiv 2006.16668, algorithm 1), and noisy top-k gating with the losses of
// importance and load (Shazeer et al., arXiv 1701.06538, sections 2.1, 4 and appendix A).
//
// Numbers come from Philox by seed, step, site and the element's index in the step's microbatches, so that they are the
// same however the batch and its sequences are divided, and when an op runs again.
#include <cmath>
#include <numbers>

#include "engine/ops/loss_of_tokens.h"
#include "engine/ops/registration.h"
#include "strata/layout.h"
#include "strata/random.h"

namespace strata::noisy_gating {
namespace {

// The numbers of one op; seed and step are its last two inputs.
class Draw {
 public:
  explicit Draw(const Binding& b)
      : seed_(uint64_t(*b.in<double>(b.inputs() - 2))),
        stream_(uint64_t(b.attributes().integer("stream")) ^
                (uint64_t(*b.in<double>(b.inputs() - 1)) * 0x9E3779B97F4A7C15ull)),
        first_(std::max(0, b.op().microbatch) * elements(b.output(0).full_shape())),
        global_(b.output(0)) {}
  // Uniform in [0, 1), by element.
  double uniform(int64_t i) const {
    const auto at = uint64_t(first_ + global_(i));
    return double(random_block(seed_, stream_, at / 4)[size_t(at % 4)]) / 4294967296.0;
  }
  float normal(int64_t i) const {
    float value;
    fill_normal(&value, first_ + global_(i), 1, 1, seed_, stream_);
    return value;
  }

 private:
  uint64_t seed_, stream_;
  int64_t first_;       // of the microbatch's elements among the step's
  GlobalIndex global_;  // of this rank's part among the microbatch's
};

bool is_drawn(const OpView& v) {
  const int n = v.inputs();
  return v.attributes().has("stream") && v.has_input(n - 2) && is_scalar(v.input(n - 2)) && v.has_input(n - 1) &&
         is_scalar(v.input(n - 1));
}
bool alike(const OpView& v, int i, int j) {
  return v.has_input(i) && v.has_input(j) && v.input(i).shape == v.input(j).shape &&
         v.input(i).dtype == v.input(j).dtype;
}
bool is_number(const OpView& v, int i) {
  return v.has_input(i) && (v.input(i).dtype == DType::f32 || v.input(i).dtype == DType::f64);
}

// Kernels of body(binding, begin, end, T{}) over the elements of the first input.
template <class Body>
std::map<std::string, Kernel, std::less<>> by_elements(Body body) {
  return {
      {"cpu", cpu_kernel([=](const Binding& b) {
         b.threads().split(elements(b.input(0).shape), 256, [&](int64_t i, int64_t end) { body(b, i, end, float{}); });
       })},
      {"reference",
       reference_kernel([=](const Binding& b, auto zero) { body(b, int64_t{0}, elements(b.input(0).shape), zero); })}};
}

// x times a uniform number of [1 - epsilon, 1 + epsilon).
void register_jitter() {
  const auto jitter = [](const Binding& b, int64_t begin, int64_t end, auto zero) {
    using T = decltype(zero);
    const Draw draw(b);
    const double epsilon = b.attributes().real("epsilon");
    const auto factor = [&](int64_t i) { return T(1 - epsilon + 2 * epsilon * draw.uniform(i)); };
    if constexpr (std::is_same_v<T, float>)
      over_f32<1, 1>(b, begin, end, [&](const auto& in, const auto& out, int64_t count, int64_t first) {
        for (int64_t i = 0; i < count; ++i) out[0][i] = in[0][i] * factor(first + i);
      });
    else
      for (int64_t i = begin; i < end; ++i) b.out<T>(0)[i] = b.in<T>(0)[i] * factor(i);
  };
  register_kind({.name = "jitter",
                 .summary = "x (…), seed, step -> x times a uniform number around 1; attributes epsilon, stream",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 3 && v.has_input(0) && is_float(v.input(0)) && is_drawn(v) &&
                               v.attributes().has("epsilon"),
                           v, "x, the scalars seed and step, and attributes epsilon and stream");
                   return {like(v.input(0))};
                 },
                 .gradient =
                     [](Differentiation& d) {
                       d.set(0, d.build().emit("jitter", {d.output_gradient(0), d.input(1), d.input(2)},
                                               d.forward().attributes()));
                     },
                 .half = true,
                 .sharding = elementwise(1, 1, 2, 1),
                 .kernels = by_elements(jitter)});
}

// The second choice stays where twice its weight is above a uniform number; of others there is none (-1).
void register_second_by_chance() {
  const auto choose = [](const Binding& b, int64_t begin, int64_t end, auto zero) {
    const Draw draw(b);
    for (int64_t i = begin; i < end; ++i) {
      const bool stays = i % 2 == 0 || 2 * double(b.in<decltype(zero)>(0)[i]) > draw.uniform(i);
      b.out<int32_t>(0)[i] = stays ? b.in<int32_t>(1)[i] : -1;
    }
  };
  register_kind({.name = "second_by_chance",
                 .summary = "weights f32 (…, 2), choices i32 (…, 2), seed, step -> choices i32 (…, 2), -1: none; "
                            "attribute stream",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 4 && is_number(v, 0) && v.columns(0) == 2 && v.has_input(1) &&
                               v.input(1).dtype == DType::i32 && v.input(1).shape == v.input(0).shape && is_drawn(v),
                           v, "weights f32 (…, 2), choices i32 (…, 2), the scalars seed and step, and stream");
                   return {like(v.input(1))};
                 },
                 .sharding = {.dimensions = "...k, ...k, _, _ -> ...k", .whole = "k"},
                 .kernels = by_elements(choose)});
}

template <class T>
T softplus(T x) {
  return std::max(x, T(0)) + std::log1p(std::exp(-std::abs(x)));
}
template <class T>
T sigmoid(T x) {
  return 1 / (1 + std::exp(-x));
}

void register_noisy_logits() {
  const auto noisy = [](const Binding& b, int64_t begin, int64_t end, auto zero) {
    using T = decltype(zero);
    const Draw draw(b);
    for (int64_t i = begin; i < end; ++i) b.out<T>(0)[i] = b.in<T>(0)[i] + T(draw.normal(i)) * softplus(b.in<T>(1)[i]);
  };
  const auto gradient = [](const Binding& b, int64_t begin, int64_t end, auto zero) {
    using T = decltype(zero);
    const Draw draw(b);
    for (int64_t i = begin; i < end; ++i) b.out<T>(0)[i] = b.in<T>(0)[i] * T(draw.normal(i)) * sigmoid(b.in<T>(1)[i]);
  };
  const auto shape = [](const OpView& v) -> std::vector<TensorSpec> {
    require(v.inputs() == 4 && is_number(v, 0) && alike(v, 0, 1) && is_drawn(v), v,
            "two f32 tensors (…, E), the scalars seed and step, and attribute stream");
    return {like(v.input(0))};
  };
  register_kind({.name = "noisy_logits",
                 .summary =
                     "clean f32 (…, E), spread f32 (…, E), seed, step -> clean + normal number · softplus(spread); "
                     "attribute stream",
                 .shape = shape,
                 .gradient =
                     [](Differentiation& d) {
                       const TensorId dy = d.output_gradient(0);
                       if (d.needs(1))
                         d.set(1, d.build().emit("noisy_logits_gradient", {dy, d.input(1), d.input(2), d.input(3)},
                                                 d.forward().attributes()));
                       if (d.needs(0)) d.set(0, dy);
                     },
                 .sharding = elementwise(2, 1, 2),
                 .kernels = by_elements(noisy)});
  register_kind({.name = "noisy_logits_gradient",
                 .summary = "dy f32 (…, E), spread f32 (…, E), seed, step -> dspread f32 (…, E); attribute stream",
                 .shape = shape,
                 .sharding = elementwise(2, 1, 2),
                 .kernels = by_elements(gradient)});
}

// The square of the coefficient of variation, and its slope.
double squared_variation(const double* x, int64_t n, double* mean, double* mean_of_squares) {
  *mean = *mean_of_squares = 0;
  for (int64_t i = 0; i < n; ++i) *mean += x[i] / double(n), *mean_of_squares += x[i] * x[i] / double(n);
  return *mean_of_squares / (*mean * *mean) - 1;
}
double slope_of_variation(double x, int64_t n, double mean, double mean_of_squares) {
  return 2 / (double(n) * mean * mean) * (x - mean_of_squares / mean);
}

// Of every expert the sum of its weights.
template <class T>
void sum_importance(const T* weights, const int32_t* choices, int64_t count, int64_t experts, double* sums) {
  std::fill_n(sums, experts, 0.0);
  for (int64_t i = 0; i < count; ++i) sums[choices[i]] += double(weights[i]);
}

// The gradient of a loss by its number, or 1.
double given(const Binding& b, int i) { return b.inputs() > i && b.has_input(i) ? *b.in<double>(i) : 1.0; }

template <class Body>
std::map<std::string, Kernel, std::less<>> with_sums(Body body) {
  const auto workspace = [](const OpView& v, int) {
    const Attributes& a = v.attributes();
    return (a.has("experts") ? a.integer("experts") : v.columns(0)) * 8;
  };
  Kernel reference = reference_kernel(body);
  reference.workspace = workspace;
  return {{"cpu", cpu_kernel([=](const Binding& b) { body(b, float{}); }, workspace)}, {"reference", reference}};
}

bool is_importance(const OpView& v) {
  return is_number(v, 0) && v.has_input(1) && v.input(1).dtype == DType::i32 && v.input(0).shape == v.input(1).shape &&
         v.attributes().has("experts") && v.attributes().has("scale");
}

void register_importance() {
  const auto loss = [](const Binding& b, auto zero) {
    using T = decltype(zero);
    const int64_t experts = b.attributes().integer("experts");
    auto* const sums = b.workspace<double>();
    sum_importance(b.in<T>(0), b.in<int32_t>(1), elements(b.input(0).shape), experts, sums);
    double mean, squares;
    *b.out<T>(0) = T(b.attributes().real("scale") * squared_variation(sums, experts, &mean, &squares));
  };
  const auto gradient = [](const Binding& b, auto zero) {
    using T = decltype(zero);
    const int64_t experts = b.attributes().integer("experts"), count = elements(b.input(0).shape);
    auto* const sums = b.workspace<double>();
    sum_importance(b.in<T>(0), b.in<int32_t>(1), count, experts, sums);
    double mean, squares;
    squared_variation(sums, experts, &mean, &squares);
    const double factor = b.attributes().real("scale") * given(b, 2);
    for (int64_t i = 0; i < count; ++i)
      b.out<T>(0)[i] = T(factor * slope_of_variation(sums[b.in<int32_t>(1)[i]], experts, mean, squares));
  };
  register_kind({.name = "importance_loss",
                 .summary = "weights f32 (…, k), choices i32 (…, k) -> f32 (1): squared variation of experts' sums of "
                            "weights; attributes experts, scale",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 2 && is_importance(v), v,
                           "weights f32 (…, k), choices i32 (…, k) and attributes experts and scale");
                   return {{{1}, v.input(0).dtype}};
                 },
                 .gradient =
                     [](Differentiation& d) {
                       std::vector<TensorId> inputs{d.input(0), d.input(1)};
                       if (d.output_gradient(0)) inputs.push_back(d.output_gradient(0));
                       d.set(0, d.build().emit("importance_loss_gradient", inputs, d.forward().attributes()));
                     },
                 .sharding = loss_of_tokens("btk, btk -> _"),
                 .kernels = with_sums(loss)});
  register_kind({.name = "importance_loss_gradient",
                 .summary = "weights f32 (…, k), choices i32 (…, k), [dloss f64 (1)] -> dweights f32 (…, k)",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(is_importance(v), v,
                           "weights f32 (…, k), choices i32 (…, k) and at most a gradient f64 (1)");
                   return {like(v.input(0))};
                 },
                 .kernels = with_sums(gradient)});
}

// Of a row of noisy logits: what an expert's must be above to be chosen, the k-th largest of the others. The choices
// come in order, the largest first.
struct Thresholds {
  int64_t last = 0, next = -1;  // experts: the k-th and the one after
  Thresholds(const auto* noisy, int64_t experts, const int32_t* choices, int64_t k) : last(choices[k - 1]) {
    for (int64_t e = 0; e < experts; ++e)
      if (!chosen(choices, k, e) && (next < 0 || noisy[e] > noisy[next])) next = e;
  }
  static bool chosen(const int32_t* choices, int64_t k, int64_t e) {
    return std::find(choices, choices + k, int32_t(e)) != choices + k;
  }
  int64_t of(const int32_t* choices, int64_t k, int64_t e) const { return chosen(choices, k, e) ? next : last; }
};

double below(double z) { return 0.5 * std::erfc(-z / std::numbers::sqrt2); }  // of the normal distribution
double density(double z) { return std::exp(-0.5 * z * z) / std::sqrt(2 * std::numbers::pi); }

// Inputs clean, spread, noisy (…, E), choices (…, k): of every expert the sum of P(x, e), the probability of being
// chosen were its noise drawn again.
template <class T>
void sum_load(const Binding& b, double* sums) {
  const int64_t experts = b.columns(0), k = b.columns(3);
  std::fill_n(sums, experts, 0.0);
  for (int64_t t = 0; t < b.rows(0); ++t) {
    const T *clean = b.in<T>(0) + t * experts, *spread = b.in<T>(1) + t * experts, *noisy = b.in<T>(2) + t * experts;
    const int32_t* choices = b.in<int32_t>(3) + t * k;
    const Thresholds thresholds(noisy, experts, choices, k);
    for (int64_t e = 0; e < experts; ++e)
      sums[e] += below(double(clean[e] - noisy[thresholds.of(choices, k, e)]) / double(softplus(spread[e])));
  }
}

template <class T>
void load_gradient(const Binding& b) {
  const int64_t experts = b.columns(0), k = b.columns(3);
  auto* const sums = b.workspace<double>();
  sum_load<T>(b, sums);
  double mean, squares;
  squared_variation(sums, experts, &mean, &squares);
  const double factor = b.attributes().real("scale") * given(b, 4);
  for (int64_t t = 0; t < b.rows(0); ++t) {
    const T *clean = b.in<T>(0) + t * experts, *spread = b.in<T>(1) + t * experts, *noisy = b.in<T>(2) + t * experts;
    T *dclean = b.out<T>(0) + t * experts, *dspread = b.out<T>(1) + t * experts, *dnoisy = b.out<T>(2) + t * experts;
    const int32_t* choices = b.in<int32_t>(3) + t * k;
    const Thresholds thresholds(noisy, experts, choices, k);
    std::fill_n(dnoisy, experts, T(0));
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t above = thresholds.of(choices, k, e);
      const double width = double(softplus(spread[e])), z = double(clean[e] - noisy[above]) / width;
      const double slope = factor * slope_of_variation(sums[e], experts, mean, squares) * density(z) / width;
      dclean[e] = T(slope);
      dspread[e] = T(-slope * z * double(sigmoid(spread[e])));
      dnoisy[above] -= T(slope);
    }
  }
}

bool is_load(const OpView& v) {
  return is_number(v, 0) && alike(v, 0, 1) && alike(v, 0, 2) && v.has_input(3) && v.input(3).dtype == DType::i32 &&
         v.rows(3) == v.rows(0) && v.columns(3) < v.columns(0) && v.attributes().has("scale");
}

void register_load() {
  const auto loss = [](const Binding& b, auto zero) {
    using T = decltype(zero);
    auto* const sums = b.workspace<double>();
    sum_load<T>(b, sums);
    double mean, squares;
    *b.out<T>(0) = T(b.attributes().real("scale") * squared_variation(sums, b.columns(0), &mean, &squares));
  };
  register_kind(
      {.name = "load_loss",
       .summary =
           "clean, spread, noisy f32 (…, E), choices i32 (…, k) -> f32 (1): squared variation of experts' sums of "
           "the probability to be chosen; attribute scale",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         require(v.inputs() == 4 && is_load(v), v,
                 "three f32 tensors (…, E), choices i32 (…, k) with k below E, and attribute scale");
         return {{{1}, v.input(0).dtype}};
       },
       .gradient =
           [](Differentiation& d) {
             std::vector<TensorId> inputs{d.input(0), d.input(1), d.input(2), d.input(3)};
             if (d.output_gradient(0)) inputs.push_back(d.output_gradient(0));
             const auto made = d.build().emit_all("load_loss_gradient", inputs, d.forward().attributes());
             for (int i = 0; i < 3; ++i) d.set(i, made[size_t(i)]);
           },
       .sharding = loss_of_tokens("bte, bte, bte, btk -> _"),
       .kernels = with_sums(loss)});
  register_kind({.name = "load_loss_gradient",
                 .summary = "clean, spread, noisy f32 (…, E), choices i32 (…, k), [dloss f64 (1)] -> their gradients",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(is_load(v), v,
                           "three f32 tensors (…, E), choices i32 (…, k) and at most a gradient f64 (1)");
                   return std::vector<TensorSpec>(3, like(v.input(0)));
                 },
                 .kernels = with_sums([](const Binding& b, auto zero) { load_gradient<decltype(zero)>(b); })});
}

const AtLoad noisy_gating_registered([] {
  register_jitter();
  register_second_by_chance();
  register_noisy_logits();
  register_importance();
  register_load();
});

}  // namespace
}  // namespace strata::noisy_gating
