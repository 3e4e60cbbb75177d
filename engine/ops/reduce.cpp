// Reductions: sum over rows (bias gradients), exact sums of squares (norms).
#include <cstring>

#include "engine/ops/registration.h"
#include "engine/ops/vector.h"
#include "strata/exact_sum.h"

namespace strata {
namespace {

using simd::F;
using simd::get;
using simd::put;

constexpr int64_t kWidth = 64;  // a cache line or four of each row at a time
// Columns [begin, end) of x (rows, columns).
STRATA_SIMD void sum_rows(const float* x, float* y, int64_t rows, int64_t columns, int64_t begin, int64_t end,
                          bool accumulate) {
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

void sum_half_rows(DType type, const void* x, float* y, int64_t rows, int64_t columns, int64_t begin, int64_t end,
                   bool accumulate) {
  for (int64_t j = begin; j < end; j += kWidth) {
    const int64_t width = std::min(kWidth, end - j);
    float sums[kWidth] = {}, row[kWidth];
    for (int64_t r = 0; r < rows; ++r) {
      to_f32(type, at(x, type, r * columns + j), row, width);
      for (int64_t i = 0; i < width; ++i) sums[i] += row[i];
    }
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

// A long row from element `first` on, chunk by chunk, in order.
double row_squares(DType type, const void* x, int64_t first, int64_t n) {
  double total = 0;
  float wide[kChunk];
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t count = std::min(kChunk, n - i);
    const float* chunk = wide;
    if (is_half(type))
      to_f32(type, at(x, type, first + i), wide, count);
    else
      chunk = static_cast<const float*>(x) + first + i;
    total += double(sum_of_squares(chunk, count));
  }
  return total;
}

// Rows of the first dimension, which is what ranks split: those of a vector are its elements, and a rank may have none.
struct Rows {
  explicit Rows(const OpView& v) : Rows(v.input(0).shape) {}
  explicit Rows(const Shape& shape) : count(shape[0]), length(elements(shape) / std::max<int64_t>(count, 1)) {}
  int64_t count, length;
};

void sum_exactly(const double* values, int64_t count, double* sum) {
  std::fill_n(sum, kExactSum, 0.0);
  for (int64_t i = 0; i < count; ++i) {
    add_number(sum, values[i]);
    if (i % (1 << 20) == (1 << 20) - 1) carry(sum);
  }
  carry(sum);
}

// Of a matrix row by row in double, then exactly; of a vector, exactly. `parts`: a double a row.
void sum_of_all_squares(const Binding& b, double* parts) {
  const Rows rows(b);
  const DType type = b.input(0).dtype;
  b.threads().split(rows.count, std::max<int64_t>(1, kChunk / std::max<int64_t>(1, rows.length)),
                    [&](int64_t i, int64_t e) {
                      for (; i < e && rows.length > 1; ++i)
                        parts[i] = row_squares(type, b.in<void>(0), i * rows.length, rows.length);
                      for (; i < e; ++i) {
                        float value;
                        to_f32(type, at(b.in<void>(0), type, i), &value, 1);
                        parts[i] = double(value) * double(value);
                      }
                    });
  sum_exactly(parts, rows.count, b.out<double>(0));
}

const AtLoad reduce_registered([] {
  register_kind({.name = "sum_rows",
                 .summary = "x (…, n) -> (n)",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 1 && v.has_input(0) && is_float(v.input(0)), v, "one floating-point tensor");
                   return {{{v.columns(0)}, wide(v.input(0).dtype)}};
                 },
                 .accumulates = 1,
                 .half = true,
                 .sharding = {.dimensions = "...n -> n", .linear = 1},
                 .kernels = {{"cpu", cpu_kernel([](const Binding& b) {
                                const DType type = b.input(0).dtype;
                                b.threads().split(b.columns(0), 64, [&](int64_t i, int64_t e) {
                                  if (is_half(type))
                                    return sum_half_rows(type, b.in<void>(0), b.out<float>(0), b.rows(0), b.columns(0),
                                                         i, e, b.accumulates(0));
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
  // The same whichever rank holds which rows.
  register_kind({.name = "sum_of_squares",
                 .summary = "x (rows, …) -> exact sum (strata/exact_sum.h)",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 1 && v.has_input(0) && is_float(v.input(0)), v, "one floating-point tensor");
                   return {{{kExactSum}, DType::f64}};
                 },
                 .half = true,
                 .kernels = {{"cpu", cpu_kernel([](const Binding& b) { sum_of_all_squares(b, b.workspace<double>()); },
                                                [](const OpView& v, int) { return Rows(v).count * 8; })},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                using T = decltype(zero);
                                std::vector<double> squares;
                                for (int64_t i = 0; i < elements(b.input(0).shape); ++i)
                                  squares.push_back(double(b.in<T>(0)[i]) * double(b.in<T>(0)[i]));
                                sum_exactly(squares.data(), int64_t(squares.size()), b.out<double>(0));
                              })}}});
  const Kernel sums{[](const Binding& b) -> Launch {
                      return [b] {
                        double* out = b.out<double>(0);
                        std::fill_n(out, kExactSum, 0.0);
                        for (int i = 0; i < b.inputs(); ++i)
                          for (int k = 0; k < kExactSum; ++k) out[k] += b.in<double>(i)[k];
                        carry(out);
                      };
                    },
                    {}};
  register_kind({.name = "add_sums",
                 .summary = "any number of exact sums -> their sum",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   bool right = v.inputs() > 0;
                   for (int i = 0; i < v.inputs(); ++i)
                     right = right && v.has_input(i) && v.input(i).shape == Shape{kExactSum};
                   require(right, v, "exact sums");
                   return {{{kExactSum}, DType::f64}};
                 },
                 .kernels = {{"cpu", sums}, {"reference", sums}}});
});

}  // namespace
}  // namespace strata
