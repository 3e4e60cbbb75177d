// Elementwise kinds: add, scale, clamp, copy, gelu, swiglu and their gradients.
#include <cmath>
#include <limits>

#include "engine/ops/gelu.h"
#include "engine/ops/registration.h"
#include "engine/ops/vector.h"

namespace strata {
namespace {

using simd::F;
using simd::get;
using simd::put;

STRATA_SIMD void add(const float* x, const float* y, float* z, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { put(z + i, get(x + i, c) + get(y + i, c), c); });
}
STRATA_SIMD void scale(const float* x, float factor, float* y, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { put(y + i, get(x + i, c) * factor, c); });
}
STRATA_SIMD void clamp(const float* x, float limit, float* y, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
    put(y + i, simd::min(simd::max(get(x + i, c), simd::set(-limit)), simd::set(limit)), c);
  });
}

// GELU in its tanh form (Hendrycks and Gimpel, arXiv 1606.08415): 0.5 x (1 + tanh(k (x + 0.044715 x³))), k = √(2/π).
STRATA_SIMD void gelu(const float* x, float* y, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
    const F v = get(x + i, c);
    put(y + i, v * simd::sigmoid(2 * kGelu * (v + kCubic * v * v * v)), c);
  });
}
STRATA_SIMD void gelu_gradient(const float* dy, const float* x, float* dx, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
    const F v = get(x + i, c);
    const F s = simd::sigmoid(2 * kGelu * (v + kCubic * v * v * v));
    put(dx + i, get(dy + i, c) * (s + v * s * (1.0f - s) * (2 * kGelu * (1.0f + 3 * kCubic * v * v))), c);
  });
}
// SwiGLU (Shazeer, arXiv 2002.05202): silu(gate)·up.
STRATA_SIMD void swiglu(const float* gate, const float* up, float* y, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
    const F g = get(gate + i, c);
    put(y + i, g * simd::sigmoid(g) * get(up + i, c), c);
  });
}
STRATA_SIMD void swiglu_gradient(const float* dy, const float* gate, const float* up, float* dgate, float* dup,
                                 int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
    const F d = get(dy + i, c), g = get(gate + i, c), u = get(up + i, c), s = simd::sigmoid(g);
    put(dgate + i, d * u * s * (1.0f + g * (1.0f - s)), c);
    put(dup + i, d * g * s, c);
  });
}

template <class T>
T gelu_slope(T x) {
  const T inner = T(0.7978845608028654) * (x + T(0.044715) * x * x * x), t = std::tanh(inner);
  return T(0.5) * (1 + t) + T(0.5) * x * (1 - t * t) * T(0.7978845608028654) * (1 + 3 * T(0.044715) * x * x);
}

auto same_shape(int inputs) {
  return [inputs](const OpView& v) -> std::vector<TensorSpec> {
    bool right = v.inputs() == inputs && v.has_input(0) && is_float(v.input(0));
    for (int i = 1; right && i < inputs; ++i)
      right = v.has_input(i) && v.input(i).shape == v.input(0).shape && v.input(i).dtype == v.input(0).dtype;
    require(right, v, std::to_string(inputs) + " floating-point tensor(s) of one shape");
    return {like(v.input(0))};
  };
}
int64_t count(const Binding& b) { return elements(b.input(0).shape); }

void register_add() {
  register_kind({.name = "add",
                 .summary = "x (…) + y (…)",
                 .shape = same_shape(2),
                 .gradient =
                     [](Differentiation& d) {
                       d.set(0, d.output_gradient(0));
                       d.set(1, d.output_gradient(0));
                     },
                 .in_place = {{0, 0}, {0, 1}},
                 .half = true,
                 .sharding = elementwise(2, 1, 0, 3),
                 .kernels = {{"cpu", elementwise_kernel<2>([](const Binding&, const auto& in, const auto& out,
                                                              int64_t n, int64_t) { add(in[0], in[1], out[0], n); })},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                using T = decltype(zero);
                                for (int64_t i = 0; i < count(b); ++i) b.out<T>(0)[i] = b.in<T>(0)[i] + b.in<T>(1)[i];
                              })}}});
}

void register_scale() {
  register_kind(
      {.name = "scale",
       .summary = "x (…) times a f64 scalar",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         require(v.inputs() == 2 && v.has_input(0) && v.has_input(1) && is_float(v.input(0)) && is_scalar(v.input(1)),
                 v, "x and a f64 (1) factor");
         return {like(v.input(0))};
       },
       .in_place = {{0, 0}},
       .half = true,
       .sharding = elementwise(1, 1, 1, 1),
       .kernels = {{"cpu", elementwise_kernel<1>([](const Binding& b, const auto& in, const auto& out, int64_t n,
                                                    int64_t) { scale(in[0], float(*b.in<double>(1)), out[0], n); })},
                   {"reference", reference_kernel([](const Binding& b, auto zero) {
                      using T = decltype(zero);
                      for (int64_t i = 0; i < count(b); ++i) b.out<T>(0)[i] = b.in<T>(0)[i] * T(*b.in<double>(1));
                    })}}});
}

void register_multiply_scalars() {
  const Kernel product{
      [](const Binding& b) -> Launch { return [b] { *b.out<double>(0) = *b.in<double>(0) * *b.in<double>(1); }; }, {}};
  register_kind({.name = "multiply_scalars",
                 .summary = "two f64 scalars -> their product",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 2 && v.has_input(0) && v.has_input(1) && is_scalar(v.input(0)) &&
                               is_scalar(v.input(1)),
                           v, "two f64 (1) scalars");
                   return {like(v.input(0))};
                 },
                 .kernels = {{"cpu", product}, {"reference", product}}});
}

void register_overflow_mark() {
  const Kernel mark{[](const Binding& b) -> Launch {
                      return [b] { *b.out<double>(0) = std::isnan(*b.in<double>(0)) ? *b.in<double>(0) : 1; };
                    },
                    {}};
  register_kind({.name = "overflow_mark",
                 .summary = "f64 scalar -> NaN where it is NaN, otherwise 1",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 1 && v.has_input(0) && is_scalar(v.input(0)), v, "a f64 (1) scalar");
                   return {like(v.input(0))};
                 },
                 .kernels = {{"cpu", mark}, {"reference", mark}}});
}

// Of updates made ahead (planning/updates_ahead.h).
void register_known_factors() {
  const Kernel known{[](const Binding& b) -> Launch {
                       return [b] {
                         const bool pending = *b.in<double>(0) != 0;
                         double again = 0;
                         for (int i = 1; i < b.inputs(); ++i) {
                           const double factor = *b.in<double>(i);
                           if (pending && factor != 1) again = 1;  // NaN, too
                           *b.out<double>(i) = pending ? factor : std::numeric_limits<double>::quiet_NaN();
                         }
                         *b.out<double>(0) = again;
                       };
                     },
                     {}};
  register_kind(
      {.name = "known_factors",
       .summary = "pending, factors … (f64 scalars) -> whether one is not 1, factors (NaN: nothing is pending)",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         bool right = v.inputs() >= 2;
         for (int i = 0; right && i < v.inputs(); ++i) right = v.has_input(i) && is_scalar(v.input(i));
         require(right, v, "f64 (1) scalars");
         return std::vector<TensorSpec>(size_t(v.inputs()), like(v.input(0)));
       },
       .kernels = {{"cpu", known}, {"reference", known}}});
  const Kernel set{[](const Binding& b) -> Launch {
                     return [b, value = b.attributes().real("value")] { *b.out<double>(0) = value; };
                   },
                   {}};
  register_kind({.name = "set_scalar",
                 .summary = "-> f64 scalar; attribute value",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 0 && v.attributes().has("value"), v, "nothing, and an attribute value");
                   return {{{1}, DType::f64}};
                 },
                 .kernels = {{"cpu", set}, {"reference", set}}});
}

void register_clamp() {
  register_kind({.name = "clamp",
                 .summary = "x (…) cut to [-limit, limit]",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 1 && v.has_input(0) && is_float(v.input(0)) && v.attributes().has("limit"), v,
                           "one tensor and an attribute limit");
                   return {like(v.input(0))};
                 },
                 .in_place = {{0, 0}},
                 .half = true,
                 .sharding = elementwise(1),
                 .kernels = {{"cpu", elementwise_kernel<1>(
                                         [](const Binding& b, const auto& in, const auto& out, int64_t n, int64_t) {
                                           clamp(in[0], float(b.attributes().real("limit")), out[0], n);
                                         })},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                using T = decltype(zero);
                                const T limit = T(b.attributes().real("limit"));
                                for (int64_t i = 0; i < count(b); ++i)
                                  b.out<T>(0)[i] = std::min(std::max(b.in<T>(0)[i], -limit), limit);
                              })}}});
}

void register_gelu() {
  register_kind({.name = "gelu",
                 .summary = "x (…) -> GELU, tanh form",
                 .shape = same_shape(1),
                 .gradient =
                     [](Differentiation& d) {
                       d.set(0, d.build().emit("gelu_gradient", {d.output_gradient(0), d.input(0)}));
                     },
                 .in_place = {{0, 0}},
                 .half = true,
                 .sharding = elementwise(1),
                 .kernels = {{"cpu", elementwise_kernel<1>([](const Binding&, const auto& in, const auto& out,
                                                              int64_t n, int64_t) { gelu(in[0], out[0], n); })},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                using T = decltype(zero);
                                for (int64_t i = 0; i < count(b); ++i) {
                                  const T x = b.in<T>(0)[i];
                                  b.out<T>(0)[i] =
                                      T(0.5) * x *
                                      (1 + std::tanh(T(0.7978845608028654) * (x + T(0.044715) * x * x * x)));
                                }
                              })}}});
}

void register_gelu_gradient() {
  register_kind(
      {.name = "gelu_gradient",
       .summary = "dy, x -> dx",
       .shape = same_shape(2),
       .in_place = {{0, 0}},
       .fusions = {{"linear_input_gradient", "linear_gelu_gradient"}},
       .half = true,
       .sharding = elementwise(2, 1, 0, 1),
       .kernels = {{"cpu", elementwise_kernel<2>([](const Binding&, const auto& in, const auto& out, int64_t n,
                                                    int64_t) { gelu_gradient(in[0], in[1], out[0], n); })},
                   {"reference", reference_kernel([](const Binding& b, auto zero) {
                      using T = decltype(zero);
                      for (int64_t i = 0; i < count(b); ++i) b.out<T>(0)[i] = b.in<T>(0)[i] * gelu_slope(b.in<T>(1)[i]);
                    })}}});
}

void register_swiglu() {
  register_kind(
      {.name = "swiglu",
       .summary = "gate, up (…) -> silu(gate)·up",
       .shape = same_shape(2),
       .gradient =
           [](Differentiation& d) {
             const auto out = d.build().emit_all("swiglu_gradient", {d.output_gradient(0), d.input(0), d.input(1)});
             d.set(0, out[0]);
             d.set(1, out[1]);
           },
       .in_place = {{0, 0}, {0, 1}},
       .half = true,
       .sharding = elementwise(2),
       .kernels = {{"cpu", elementwise_kernel<2>([](const Binding&, const auto& in, const auto& out, int64_t n,
                                                    int64_t) { swiglu(in[0], in[1], out[0], n); })},
                   {"reference", reference_kernel([](const Binding& b, auto zero) {
                      using T = decltype(zero);
                      for (int64_t i = 0; i < count(b); ++i) {
                        const T g = b.in<T>(0)[i];
                        b.out<T>(0)[i] = g / (1 + std::exp(-g)) * b.in<T>(1)[i];
                      }
                    })}}});
}

void register_swiglu_gradient() {
  register_kind(
      {.name = "swiglu_gradient",
       .summary = "dy, gate, up -> dgate, dup",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         const auto one = same_shape(3)(v);
         return {one[0], one[0]};
       },
       .in_place = {{0, 0}, {1, 1}, {1, 2}},
       .half = true,
       .sharding = elementwise(3, 2, 0, 1),
       .kernels = {
           {"cpu", elementwise_kernel<3, 2>([](const Binding&, const auto& in, const auto& out, int64_t n, int64_t) {
              swiglu_gradient(in[0], in[1], in[2], out[0], out[1], n);
            })},
           {"reference", reference_kernel([](const Binding& b, auto zero) {
              using T = decltype(zero);
              for (int64_t i = 0; i < count(b); ++i) {
                const T d = b.in<T>(0)[i], g = b.in<T>(1)[i], u = b.in<T>(2)[i], s = 1 / (1 + std::exp(-g));
                b.out<T>(0)[i] = d * u * s * (1 + g * (1 - s));
                b.out<T>(1)[i] = d * g * s;
              }
            })}}});
}

const AtLoad elementwise_registered([] {
  register_add();
  register_scale();
  register_multiply_scalars();
  register_known_factors();
  register_overflow_mark();
  register_clamp();
  register_gelu();
  register_gelu_gradient();
  register_swiglu();
  register_swiglu_gradient();
});

}  // namespace
}  // namespace strata
