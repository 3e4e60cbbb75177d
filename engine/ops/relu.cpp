// ReLU and squared ReLU (So et al., arXiv 2109.08668). Their gradients take the output, not the input: the input need
// not be kept, and the output, which the next product keeps anyway, is half zeros and can be kept in fewer bytes.
#include <cmath>

#include "engine/ops/registration.h"
#include "engine/ops/vector.h"

namespace strata {
namespace {

using simd::F;
using simd::get;
using simd::put;

STRATA_SIMD void relu(const float* x, float* y, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { put(y + i, simd::max(get(x + i, c), F{}), c); });
}
STRATA_SIMD void relu_gradient(const float* dy, const float* y, float* dx, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c)
                   STRATA_INLINE_LAMBDA { put(dx + i, get(y + i, c) > 0.0f ? get(dy + i, c) : F{}, c); });
}
STRATA_SIMD void squared_relu(const float* x, float* y, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
    const F v = simd::max(get(x + i, c), F{});
    put(y + i, v * v, c);
  });
}
// dx = dy · 2 max(x, 0) = dy · 2 √y; √(r·r) is r exactly where r·r neither over- nor underflows (IEEE 754).
void squared_relu_gradient(const float* dy, const float* y, float* dx, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dx[i] = dy[i] * (2.0f * std::sqrt(y[i]));
}

std::function<std::vector<TensorSpec>(const OpView&)> same_shape(int inputs) {
  return [inputs](const OpView& v) -> std::vector<TensorSpec> {
    bool right = v.inputs() == inputs && v.has_input(0) && is_float(v.input(0));
    for (int i = 1; right && i < inputs; ++i)
      right = v.has_input(i) && v.input(i).shape == v.input(0).shape && v.input(i).dtype == v.input(0).dtype;
    require(right, v, std::to_string(inputs) + " floating-point tensor(s) of one shape");
    return {like(v.input(0))};
  };
}

// One elementwise kind: f32 loop `fast`, and `plain` on one element in any type.
template <int kIn, class Fast, class Plain>
std::map<std::string, Kernel, std::less<>> kernels(Fast fast, Plain plain) {
  return {{"cpu", elementwise_kernel<kIn>([fast](const Binding&, const auto& in, const auto& out, int64_t n, int64_t) {
             fast(in, out[0], n);
           })},
          {"reference", reference_kernel([plain](const Binding& b, auto zero) {
             using T = decltype(zero);
             for (int64_t i = 0; i < elements(b.input(0).shape); ++i)
               b.out<T>(0)[i] = plain(b.in<T>(0)[i], b.inputs() > 1 ? b.in<T>(1)[i] : T(0));
           })}};
}

void add_pair(const std::string& name, const std::string& summary, std::map<std::string, Kernel, std::less<>> forward,
              std::map<std::string, Kernel, std::less<>> backward) {
  register_kind({.name = name,
                 .summary = summary,
                 .shape = same_shape(1),
                 .gradient =
                     [name](Differentiation& d) {
                       d.set(0, d.build().emit(name + "_gradient", {d.output_gradient(0), d.output(0)}));
                     },
                 .in_place = {{0, 0}},
                 .half = true,
                 .sharding = elementwise(1),
                 .kernels = std::move(forward)});
  register_kind({.name = name + "_gradient",
                 .summary = "dy, y -> dx",
                 .shape = same_shape(2),
                 .in_place = {{0, 0}},
                 .half = true,
                 .sharding = elementwise(2, 1, 0, 1),
                 .kernels = std::move(backward)});
}

const AtLoad relu_registered([] {
  add_pair("relu", "x (…) -> max(x, 0)",
           kernels<1>([](const auto& in, float* out, int64_t n) { relu(in[0], out, n); },
                      [](auto x, auto) { return x < 0 ? decltype(x)(0) : x; }),
           kernels<2>([](const auto& in, float* out, int64_t n) { relu_gradient(in[0], in[1], out, n); },
                      [](auto dy, auto y) { return y > 0 ? dy : decltype(dy)(0); }));
  add_pair("squared_relu", "x (…) -> max(x, 0)²",
           kernels<1>([](const auto& in, float* out, int64_t n) { squared_relu(in[0], out, n); },
                      [](auto x, auto) { return x < 0 ? decltype(x)(0) : x * x; }),
           kernels<2>([](const auto& in, float* out, int64_t n) { squared_relu_gradient(in[0], in[1], out, n); },
                      [](auto dy, auto y) { return dy * 2 * std::sqrt(y); }));
});

}  // namespace
}  // namespace strata
