// Rows weighed by the logistic function of a number each: the gate of an expert that every token goes to (Qwen2-MoE,
// arXiv 2407.10671, 2.2.2). The number stays in f32 where rows have 16 bits.
#include <cmath>

#include "engine/ops/registration.h"
#include "engine/ops/vector.h"

namespace strata::sigmoid_gate {
namespace {

template <class T>
T logistic(T x) {
  return 1 / (1 + std::exp(-x));
}

bool fits(const OpView& v, int x, int gate) {
  return v.has_input(x) && is_float(v.input(x)) && v.has_input(gate) && v.input(gate).dtype == wide(v.input(x).dtype) &&
         v.columns(gate) == 1 && v.rows(gate) == v.rows(x);
}

constexpr int64_t kChunk = 512;  // of a row as f32

STRATA_SIMD void scale_row(const float* x, float factor, float* y, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { simd::put(y + i, simd::get(x + i, c) * factor, c); });
}
STRATA_SIMD float row_product(const float* x, const float* y, int64_t n) {
  simd::F sum{};
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { sum += simd::get(x + i, c) * simd::get(y + i, c); });
  return simd::sum(sum);
}

void forward(const Binding& b) {
  const DType type = b.input(0).dtype;
  const int64_t columns = b.columns(0);
  b.threads().split(b.rows(0), 16, [&](int64_t t, int64_t end) {
    alignas(64) float x[kChunk], y[kChunk];
    for (; t < end; ++t) {
      const float factor = logistic(b.in<float>(1)[t]);
      for (int64_t c = 0; c < columns; c += kChunk) {
        const int64_t n = std::min(kChunk, columns - c), at_element = t * columns + c;
        to_f32(type, at(b.in<void>(0), type, at_element), x, n);
        scale_row(x, factor, y, n);
        from_f32(type, y, at(b.out<void>(0), type, at_element), n);
      }
    }
  });
}

// Inputs dy, x, gate; dx = dy·σ, dgate = σ (1 - σ) Σ dy·x.
void backward(const Binding& b) {
  const DType type = b.input(0).dtype;
  const int64_t columns = b.columns(0);
  b.threads().split(b.rows(0), 16, [&](int64_t t, int64_t end) {
    alignas(64) float dy[kChunk], x[kChunk], dx[kChunk];
    for (; t < end; ++t) {
      const float factor = logistic(b.in<float>(2)[t]);
      float sum = 0;
      for (int64_t c = 0; c < columns; c += kChunk) {
        const int64_t n = std::min(kChunk, columns - c), at_element = t * columns + c;
        to_f32(type, at(b.in<void>(0), type, at_element), dy, n);
        to_f32(type, at(b.in<void>(1), type, at_element), x, n);
        sum += row_product(dy, x, n);
        scale_row(dy, factor, dx, n);
        from_f32(type, dx, at(b.out<void>(0), type, at_element), n);
      }
      b.out<float>(1)[t] = sum * factor * (1 - factor);
    }
  });
}

template <class T>
void plain_forward(const Binding& b) {
  const int64_t columns = b.columns(0);
  for (int64_t t = 0; t < b.rows(0); ++t)
    for (int64_t c = 0; c < columns; ++c)
      b.out<T>(0)[t * columns + c] = b.in<T>(0)[t * columns + c] * logistic(b.in<T>(1)[t]);
}

template <class T>
void plain_backward(const Binding& b) {
  const int64_t columns = b.columns(0);
  for (int64_t t = 0; t < b.rows(0); ++t) {
    const T factor = logistic(b.in<T>(2)[t]);
    T sum = 0;
    for (int64_t c = 0; c < columns; ++c) {
      sum += b.in<T>(0)[t * columns + c] * b.in<T>(1)[t * columns + c];
      b.out<T>(0)[t * columns + c] = b.in<T>(0)[t * columns + c] * factor;
    }
    b.out<T>(1)[t] = sum * factor * (1 - factor);
  }
}

const AtLoad sigmoid_gate_registered([] {
  register_kind(
      {.name = "sigmoid_gate",
       .summary = "x (…, C), gate f32 (…, 1) -> x times the logistic function of its row's gate",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         require(v.inputs() == 2 && fits(v, 0, 1), v, "x (…, C) and gate f32 (…, 1)");
         return {like(v.input(0))};
       },
       .gradient =
           [](Differentiation& d) {
             const std::vector<TensorId> made =
                 d.build().emit_all("sigmoid_gate_gradient", {d.output_gradient(0), d.input(0), d.input(1)});
             d.set(0, made[0]);
             d.set(1, made[1]);
           },
       .half = true,
       .sharding = {.dimensions = "...c, ...g -> ...c", .whole = "cg"},
       .kernels = {{"cpu", cpu_kernel(forward)}, {"reference", reference_kernel([](const Binding& b, auto zero) {
                                                    plain_forward<decltype(zero)>(b);
                                                  })}}});
  register_kind(
      {.name = "sigmoid_gate_gradient",
       .summary = "dy (…, C), x (…, C), gate f32 (…, 1) -> dx (…, C), dgate f32 (…, 1)",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         require(v.inputs() == 3 && fits(v, 0, 2) && v.has_input(1) && v.input(1).shape == v.input(0).shape &&
                     v.input(1).dtype == v.input(0).dtype,
                 v, "dy and x (…, C) and gate f32 (…, 1)");
         return {like(v.input(0)), like(v.input(2))};
       },
       .half = true,
       .sharding = {.dimensions = "...c, ...c, ...g -> ...c, ...g", .whole = "cg"},
       .kernels = {{"cpu", cpu_kernel(backward)}, {"reference", reference_kernel([](const Binding& b, auto zero) {
                                                     plain_backward<decltype(zero)>(b);
                                                   })}}});
});

}  // namespace
}  // namespace strata::sigmoid_gate
