// GELU in its exact form, x·Φ(x) (Hendrycks and Gimpel, arXiv 1606.08415), and gated layers with GELU in place of SiLU
// (GEGLU; Shazeer, arXiv 2002.05202): gelu(gate)·up, in the tanh form and in the exact one.
#include <cmath>

#include "engine/ops/gelu.h"
#include "engine/ops/registration.h"
#include "engine/ops/vector.h"

namespace strata {
namespace {

using simd::F;
using simd::get;
using simd::put;

// Value and slope of x·Φ(x).
template <class T>
struct ExactGelu {
  T value, slope;
  explicit ExactGelu(T x) {
    const T below = T(0.5) * std::erfc(-x * T(0.7071067811865476));
    value = x * below;
    slope = below + x * T(0.3989422804014327) * std::exp(T(-0.5) * x * x);
  }
};
// The same of the tanh form.
template <class T>
struct TanhGelu {
  T value, slope;
  explicit TanhGelu(T x) {
    const T k = T(0.7978845608028654), c = T(0.044715), t = std::tanh(k * (x + c * x * x * x));
    value = T(0.5) * x * (1 + t);
    slope = T(0.5) * (1 + t) + T(0.5) * x * (1 - t * t) * k * (1 + 3 * c * x * x);
  }
};

STRATA_SIMD void geglu(const float* gate, const float* up, float* y, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
    const F v = get(gate + i, c);
    put(y + i, v * simd::sigmoid(2 * kGelu * (v + kCubic * v * v * v)) * get(up + i, c), c);
  });
}
STRATA_SIMD void geglu_gradient(const float* dy, const float* gate, const float* up, float* dgate, float* dup,
                                int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
    const F d = get(dy + i, c), v = get(gate + i, c), u = get(up + i, c);
    const F s = simd::sigmoid(2 * kGelu * (v + kCubic * v * v * v));
    put(dgate + i, d * u * (s + v * s * (1.0f - s) * (2 * kGelu * (1.0f + 3 * kCubic * v * v))), c);
    put(dup + i, d * v * s, c);
  });
}
void geglu_exact(const float* gate, const float* up, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = ExactGelu<float>(gate[i]).value * up[i];
}
void geglu_exact_gradient(const float* dy, const float* gate, const float* up, float* dgate, float* dup, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const ExactGelu<float> of(gate[i]);
    const float d = dy[i], u = up[i];  // results may lie where these are
    dgate[i] = d * u * of.slope;
    dup[i] = d * of.value;
  }
}

std::function<std::vector<TensorSpec>(const OpView&)> alike(int inputs, int outputs) {
  return [=](const OpView& v) -> std::vector<TensorSpec> {
    bool right = v.inputs() == inputs && v.has_input(0) && is_float(v.input(0));
    for (int i = 1; right && i < inputs; ++i)
      right = v.has_input(i) && v.input(i).shape == v.input(0).shape && v.input(i).dtype == v.input(0).dtype;
    require(right, v, std::to_string(inputs) + " floating-point tensor(s) of one shape");
    return std::vector<TensorSpec>(size_t(outputs), like(v.input(0)));
  };
}

void register_gelu_exact() {
  register_kind({.name = "gelu_exact",
                 .summary = "x (…) -> GELU, exact form: x·Φ(x)",
                 .shape = alike(1, 1),
                 .gradient =
                     [](Differentiation& d) {
                       d.set(0, d.build().emit("gelu_exact_gradient", {d.output_gradient(0), d.input(0)}));
                     },
                 .in_place = {{0, 0}},
                 .half = true,
                 .sharding = elementwise(1),
                 .kernels = {{"cpu", elementwise_kernel<1>(
                                         [](const Binding&, const auto& in, const auto& out, int64_t n, int64_t) {
                                           for (int64_t i = 0; i < n; ++i) out[0][i] = ExactGelu<float>(in[0][i]).value;
                                         })},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                using T = decltype(zero);
                                for (int64_t i = 0; i < elements(b.input(0).shape); ++i)
                                  b.out<T>(0)[i] = ExactGelu<T>(b.in<T>(0)[i]).value;
                              })}}});
  register_kind({.name = "gelu_exact_gradient",
                 .summary = "dy, x -> dx",
                 .shape = alike(2, 1),
                 .in_place = {{0, 0}},
                 .half = true,
                 .sharding = elementwise(2, 1, 0, 1),
                 .kernels = {{"cpu", elementwise_kernel<2>(
                                         [](const Binding&, const auto& in, const auto& out, int64_t n, int64_t) {
                                           for (int64_t i = 0; i < n; ++i)
                                             out[0][i] = in[0][i] * ExactGelu<float>(in[1][i]).slope;
                                         })},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                using T = decltype(zero);
                                for (int64_t i = 0; i < elements(b.input(0).shape); ++i)
                                  b.out<T>(0)[i] = b.in<T>(0)[i] * ExactGelu<T>(b.in<T>(1)[i]).slope;
                              })}}});
}

template <class Fast>
Kernel forward_kernel(Fast fast) {
  return elementwise_kernel<2>(
      [fast](const Binding&, const auto& in, const auto& out, int64_t n, int64_t) { fast(in[0], in[1], out[0], n); });
}
template <class Fast>
Kernel gradient_kernel(Fast fast) {
  return elementwise_kernel<3, 2>([fast](const Binding&, const auto& in, const auto& out, int64_t n, int64_t) {
    fast(in[0], in[1], in[2], out[0], out[1], n);
  });
}
template <template <class> class Gelu>
Kernel plain_forward() {
  return reference_kernel([](const Binding& b, auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0; i < elements(b.input(0).shape); ++i)
      b.out<T>(0)[i] = Gelu<T>(b.in<T>(0)[i]).value * b.in<T>(1)[i];
  });
}
template <template <class> class Gelu>
Kernel plain_gradient() {
  return reference_kernel([](const Binding& b, auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0; i < elements(b.input(0).shape); ++i) {
      const T d = b.in<T>(0)[i], u = b.in<T>(2)[i];
      const Gelu<T> of(b.in<T>(1)[i]);
      b.out<T>(0)[i] = d * u * of.slope;
      b.out<T>(1)[i] = d * of.value;
    }
  });
}

void register_gated(const std::string& name, const std::string& form, Kernel forward, Kernel backward, Kernel plain,
                    Kernel plain_backward) {
  register_kind(
      {.name = name,
       .summary = "gate, up (…) -> gelu(gate)·up, " + form + " form",
       .shape = alike(2, 1),
       .gradient =
           [name](Differentiation& d) {
             const auto out = d.build().emit_all(name + "_gradient", {d.output_gradient(0), d.input(0), d.input(1)});
             d.set(0, out[0]);
             d.set(1, out[1]);
           },
       .in_place = {{0, 0}, {0, 1}},
       .half = true,
       .sharding = elementwise(2),
       .kernels = {{"cpu", std::move(forward)}, {"reference", std::move(plain)}}});
  register_kind({.name = name + "_gradient",
                 .summary = "dy, gate, up -> dgate, dup",
                 .shape = alike(3, 2),
                 .in_place = {{0, 0}, {1, 1}, {1, 2}},
                 .half = true,
                 .sharding = elementwise(3, 2, 0, 1),
                 .kernels = {{"cpu", std::move(backward)}, {"reference", std::move(plain_backward)}}});
}

const AtLoad geglu_registered([] {
  register_gelu_exact();
  register_gated("geglu", "tanh", forward_kernel(geglu), gradient_kernel(geglu_gradient), plain_forward<TanhGelu>(),
                 plain_gradient<TanhGelu>());
  register_gated("geglu_exact", "exact", forward_kernel(geglu_exact), gradient_kernel(geglu_exact_gradient),
                 plain_forward<ExactGelu>(), plain_gradient<ExactGelu>());
});

}  // namespace
}  // namespace strata
