// Reductions: sum over rows (bias gradients), sum of squares and sums of scalars (norms).
#include <cstring>

#include "engine/ops/registration.h"
#include "engine/ops/vector.h"

namespace strata {
namespace {

using simd::F;
using simd::get;
using simd::put;

// Columns [begin, end) of x (rows, columns).
STRATA_SIMD void sum_rows(const float* x, float* y, int64_t rows, int64_t columns, int64_t begin, int64_t end,
                          bool accumulate) {
  constexpr int64_t kWidth = 64;  // a cache line or four of each row at a time
  for (int64_t j = begin; j < end; j += kWidth) {
    const int64_t width = std::min(kWidth, end - j);
    float sums[kWidth] = {};
    for (int64_t r = 0; r < rows; ++r)
      simd::map(width, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
        put(sums + i, get(sums + i, c) + get(x + r * columns + j + i, c), c);
      });
    for (int64_t i = 0; i < width; ++i) y[j + i] = (accumulate ? y[j + i] : 0.0f) + sums[i];
  }
}

// Lanes in float over a chunk of at most kChunk elements (rounding error below 1e-5 relative), chunks in double.
constexpr int64_t kChunk = 4096;
STRATA_SIMD float sum_of_squares(const float* x, int64_t n) {
  F total{};
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
    const F v = get(x + i, c);
    total += v * v;
  });
  return simd::sum(total);
}

int64_t chunks(const OpView& v) { return (elements(v.input(0).shape) + kChunk - 1) / kChunk; }

const AtLoad registered([] {
  register_kind({.name = "sum_rows",
                 .summary = "x (…, n) -> (n)",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 1 && v.has_input(0) && is_float(v.input(0)), v, "one floating-point tensor");
                   return {{{v.columns(0)}, v.input(0).dtype}};
                 },
                 .accumulates = 1,
                 .kernels = {{"cpu", cpu_kernel([](const Binding& b) {
                                b.threads().split(b.columns(0), 64, [&](int64_t i, int64_t e) {
                                  sum_rows(b.in<float>(0), b.out<float>(0), b.rows(0), b.columns(0), i, e,
                                           b.accumulates(0));
                                });
                              })},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                using T = decltype(zero);
                                if (!b.accumulates(0)) std::fill_n(b.out<T>(0), b.columns(0), T(0));
                                for (int64_t i = 0; i < elements(b.input(0).shape); ++i)
                                  b.out<T>(0)[i % b.columns(0)] += b.in<T>(0)[i];
                              })}}});
  register_kind({.name = "sum_of_squares",
                 .summary = "x (…) -> f64 (1)",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 1 && v.has_input(0) && is_float(v.input(0)), v, "one floating-point tensor");
                   return {{{1}, DType::f64}};
                 },
                 // Chunks are summed in order whatever the number of threads.
                 .kernels = {{"cpu", cpu_kernel(
                                         [](const Binding& b) {
                                           const int64_t n = elements(b.input(0).shape);
                                           float* parts = b.workspace<float>();
                                           b.threads().split(chunks(b), 4, [&](int64_t i, int64_t e) {
                                             for (; i < e; ++i)
                                               parts[i] = sum_of_squares(b.in<float>(0) + i * kChunk,
                                                                         std::min(kChunk, n - i * kChunk));
                                           });
                                           double total = 0;
                                           for (int64_t i = 0; i < chunks(b); ++i) total += parts[i];
                                           *b.out<double>(0) = total;
                                         },
                                         [](const OpView& v, int) { return chunks(v) * 4; })},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                using T = decltype(zero);
                                double total = 0;
                                for (int64_t i = 0; i < elements(b.input(0).shape); ++i)
                                  total += double(b.in<T>(0)[i]) * double(b.in<T>(0)[i]);
                                *b.out<double>(0) = total;
                              })}}});
  const Kernel sum{[](const Binding& b) -> Launch {
                     return [b] {
                       double total = 0;
                       for (int i = 0; i < b.inputs(); ++i) total += *b.in<double>(i);
                       *b.out<double>(0) = total;
                     };
                   },
                   {}};
  register_kind({.name = "sum_scalars",
                 .summary = "any number of f64 (1) -> f64 (1)",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   bool right = v.inputs() > 0;
                   for (int i = 0; i < v.inputs(); ++i) right = right && v.has_input(i) && is_scalar(v.input(i));
                   require(right, v, "f64 scalars");
                   return {{{1}, DType::f64}};
                 },
                 .kernels = {{"cpu", sum}, {"reference", sum}}});
});

}  // namespace
}  // namespace strata
