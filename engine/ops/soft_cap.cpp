// Products with a constant, as of embeddings, and soft caps of logits that are an end in themselves (Gemma 2, arXiv
// 2408.00118): cap·tanh(x / cap).
#include <cmath>

#include "engine/ops/registration.h"
#include "engine/ops/vector.h"

namespace strata {
namespace {

using simd::F;
using simd::get;
using simd::put;

STRATA_SIMD void multiply(const float* x, float factor, float* y, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { put(y + i, get(x + i, c) * factor, c); });
}
STRATA_SIMD void soft_cap(const float* x, float cap, float* y, int64_t n) {
  simd::map(n,
            [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { put(y + i, cap * simd::tanh(get(x + i, c) / cap), c); });
}
STRATA_SIMD void soft_cap_gradient(const float* dy, const float* y, float cap, float* dx, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
    const F share = get(y + i, c) / cap;
    put(dx + i, get(dy + i, c) * (1.0f - share * share), c);
  });
}

std::function<std::vector<TensorSpec>(const OpView&)> with_attribute(int inputs, const std::string& name) {
  return [=](const OpView& v) -> std::vector<TensorSpec> {
    bool right = v.inputs() == inputs && v.has_input(0) && is_float(v.input(0)) && v.attributes().has(name);
    for (int i = 1; right && i < inputs; ++i)
      right = v.has_input(i) && v.input(i).shape == v.input(0).shape && v.input(i).dtype == v.input(0).dtype;
    require(right, v, std::to_string(inputs) + " floating-point tensor(s) of one shape and an attribute " + name);
    return {like(v.input(0))};
  };
}

void register_multiply() {
  register_kind({.name = "multiply",
                 .summary = "x (…) times the attribute factor",
                 .shape = with_attribute(1, "factor"),
                 .gradient =
                     [](Differentiation& d) {
                       d.set(0, d.build().emit("multiply", {d.output_gradient(0)}, d.forward().attributes()));
                     },
                 .in_place = {{0, 0}},
                 .half = true,
                 .sharding = elementwise(1, 1, 0, 1),
                 .kernels = {{"cpu", elementwise_kernel<1>(
                                         [](const Binding& b, const auto& in, const auto& out, int64_t n, int64_t) {
                                           multiply(in[0], float(b.attributes().real("factor")), out[0], n);
                                         })},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                using T = decltype(zero);
                                const T factor = T(b.attributes().real("factor"));
                                for (int64_t i = 0; i < elements(b.input(0).shape); ++i)
                                  b.out<T>(0)[i] = b.in<T>(0)[i] * factor;
                              })}}});
}

void register_soft_cap() {
  register_kind(
      {.name = "soft_cap",
       .summary = "x (…) -> cap·tanh(x / cap), cap an attribute",
       .shape = with_attribute(1, "cap"),
       .gradient =
           [](Differentiation& d) {
             d.set(0,
                   d.build().emit("soft_cap_gradient", {d.output_gradient(0), d.output(0)}, d.forward().attributes()));
           },
       .in_place = {{0, 0}},
       .half = true,
       .sharding = elementwise(1),
       .kernels = {
           {"cpu", elementwise_kernel<1>([](const Binding& b, const auto& in, const auto& out, int64_t n, int64_t) {
              soft_cap(in[0], float(b.attributes().real("cap")), out[0], n);
            })},
           {"reference", reference_kernel([](const Binding& b, auto zero) {
              using T = decltype(zero);
              const T cap = T(b.attributes().real("cap"));
              for (int64_t i = 0; i < elements(b.input(0).shape); ++i)
                b.out<T>(0)[i] = cap * std::tanh(b.in<T>(0)[i] / cap);
            })}}});
  register_kind({.name = "soft_cap_gradient",
                 .summary = "dy, y -> dx",
                 .shape = with_attribute(2, "cap"),
                 .in_place = {{0, 0}},
                 .half = true,
                 .sharding = elementwise(2, 1, 0, 1),
                 .kernels = {{"cpu", elementwise_kernel<2>([](const Binding& b, const auto& in, const auto& out,
                                                              int64_t n, int64_t) {
                                soft_cap_gradient(in[0], in[1], float(b.attributes().real("cap")), out[0], n);
                              })},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                using T = decltype(zero);
                                const T cap = T(b.attributes().real("cap"));
                                for (int64_t i = 0; i < elements(b.input(0).shape); ++i) {
                                  const T share = b.in<T>(1)[i] / cap;
                                  b.out<T>(0)[i] = b.in<T>(0)[i] * (1 - share * share);
                                }
                              })}}});
}

const AtLoad soft_cap_registered([] {
  register_multiply();
  register_soft_cap();
});

}  // namespace
}  // namespace strata
