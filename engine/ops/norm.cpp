// LayerNorm (Ba et al., arXiv 1607.06450) and RMSNorm (Zhang and Sennrich, arXiv 1910.07467) over the last dimension.
// Both are one family: RMSNorm has neither mean nor bias.
#include <cmath>

#include "engine/ops/norm_rows.h"
#include "engine/ops/registration.h"
#include "engine/ops/vector.h"

namespace strata {
namespace {

using simd::F;
using simd::get;
using simd::put;

// rows × columns; mean and 1/σ of row r go to statistics[2r], [2r+1]; for RMSNorm 1/rms to statistics[r].
STRATA_SIMD void layer_norm(const float* x, const float* w, const float* b, float* y, float* statistics, int64_t rows,
                            int64_t columns, float epsilon) {
  for (int64_t r = 0; r < rows; ++r, x += columns, y += columns) {
    F total{};
    simd::map(columns, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { total += get(x + i, c); });
    const float mean = simd::sum(total) / float(columns);
    F squares{};
    int64_t i = 0;
    for (; i + simd::kLanes <= columns; i += simd::kLanes) {
      const F d = simd::load(x + i) - mean;
      squares += d * d;
    }
    float rest = 0;
    for (; i < columns; ++i) rest += (x[i] - mean) * (x[i] - mean);
    const float inverse = 1 / std::sqrt((simd::sum(squares) + rest) / float(columns) + epsilon);
    statistics[2 * r] = mean;
    statistics[2 * r + 1] = inverse;
    simd::map(columns, [&](int64_t j, int64_t c) STRATA_INLINE_LAMBDA {
      put(y + j, (get(x + j, c) - mean) * inverse * get(w + j, c) + get(b + j, c), c);
    });
  }
}

// y = x/rms · (offset + w).
STRATA_SIMD void rms_norm(const float* x, const float* w, float* y, float* statistics, int64_t rows, int64_t columns,
                          float epsilon, float offset) {
  for (int64_t r = 0; r < rows; ++r, x += columns, y += columns) {
    F squares{};
    simd::map(columns, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
      const F v = get(x + i, c);
      squares += v * v;
    });
    const float inverse = 1 / std::sqrt(simd::sum(squares) / float(columns) + epsilon);
    statistics[r] = inverse;
    simd::map(columns, [&](int64_t j, int64_t c)
                           STRATA_INLINE_LAMBDA { put(y + j, get(x + j, c) * inverse * (offset + get(w + j, c)), c); });
  }
}

// dx (set, or added to) and this part's column sums dw, db (added to). b: LayerNorm, else RMSNorm.
STRATA_SIMD void norm_gradient(const float* dy, const float* x, const float* w, const float* statistics, float* dx,
                               float* dw, float* db, int64_t rows, int64_t columns, bool layer, bool accumulate,
                               float offset) {
  for (int64_t r = 0; r < rows; ++r, x += columns, dy += columns, dx += columns) {
    const float mean = layer ? statistics[2 * r] : 0, inverse = layer ? statistics[2 * r + 1] : statistics[r];
    F dots{}, totals{};
    simd::map(columns, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
      const F g = get(dy + i, c), normed = (get(x + i, c) - mean) * inverse, gw = g * (offset + get(w + i, c));
      dots += gw * normed;
      totals += gw;
      put(dw + i, get(dw + i, c) + g * normed, c);
      if (layer) put(db + i, get(db + i, c) + g, c);
    });
    const float dot = simd::sum(dots) / float(columns), total = layer ? simd::sum(totals) / float(columns) : 0;
    simd::map(columns, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
      const F normed = (get(x + i, c) - mean) * inverse;
      F d = (get(dy + i, c) * (offset + get(w + i, c)) - total - normed * dot) * inverse;
      if (accumulate) d += get(dx + i, c);
      put(dx + i, d, c);
    });
  }
}

STRATA_SIMD void add_rows(const float* parts, int64_t stride, int64_t count, float* out, int64_t n, bool accumulate) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
    F sum = accumulate ? get(out + i, c) : F{};
    for (int64_t p = 0; p < count; ++p) sum += get(parts + p * stride + i, c);
    put(out + i, sum, c);
  });
}

// Of RMSNorm: weights count from it (Gemma's are learned from 0 on, and mean 1 more).
double offset_of(const OpView& v) { return v.attributes().real("offset", 0.0); }

// y = normalize(x)·(offset + w) + b in T, plain.
template <class T>
void reference_norm(const Binding& b, bool layer) {
  const int64_t rows = b.rows(0), columns = b.columns(0);
  const T epsilon = T(b.attributes().real("epsilon")), offset = T(offset_of(b));
  for (int64_t r = 0; r < rows; ++r) {
    const T* x = b.in<T>(0) + r * columns;
    T* y = b.out<T>(0) + r * columns;
    T mean = 0, variance = 0;
    for (int64_t i = 0; layer && i < columns; ++i) mean += x[i] / T(columns);
    for (int64_t i = 0; i < columns; ++i) variance += (x[i] - mean) * (x[i] - mean) / T(columns);
    const T inverse = 1 / std::sqrt(variance + epsilon);
    if (layer) b.out<T>(1)[2 * r] = mean;
    b.out<T>(1)[layer ? 2 * r + 1 : r] = inverse;
    for (int64_t i = 0; i < columns; ++i)
      y[i] = (x[i] - mean) * inverse * (offset + b.in<T>(1)[i]) + (layer ? b.in<T>(2)[i] : T(0));
  }
}

template <class T>
void reference_gradient(const Binding& b, bool layer) {
  const int64_t rows = b.rows(0), columns = b.columns(0);
  const T offset = T(offset_of(b));
  for (int o = 1; o < b.outputs(); ++o)
    if (!b.accumulates(o)) std::fill_n(b.out<T>(o), columns, T(0));
  for (int64_t r = 0; r < rows; ++r) {
    const T *dy = b.in<T>(0) + r * columns, *x = b.in<T>(1) + r * columns, *w = b.in<T>(2);
    T* dx = b.out<T>(0) + r * columns;
    const T mean = layer ? b.in<T>(3)[2 * r] : T(0), inverse = b.in<T>(3)[layer ? 2 * r + 1 : r];
    T dot = 0, total = 0;
    for (int64_t i = 0; i < columns; ++i) {
      const T normed = (x[i] - mean) * inverse;
      dot += dy[i] * (offset + w[i]) * normed / T(columns);
      if (layer) total += dy[i] * (offset + w[i]) / T(columns);
      b.out<T>(1)[i] += dy[i] * normed;
      if (layer) b.out<T>(2)[i] += dy[i];
    }
    for (int64_t i = 0; i < columns; ++i)
      dx[i] = (b.accumulates(0) ? dx[i] : T(0)) +
              (dy[i] * (offset + w[i]) - total - (x[i] - mean) * inverse * dot) * inverse;
  }
}

// Scratch bytes for `shared` rows in f32 and `own` rows a thread, where what is stored has 16 bits.
int64_t half_rows(const OpView& v, int threads, int shared, int own) {
  return is_half(compute_type(v)) ? (shared + own * threads) * padded(v.columns(0)) * 4 : 0;
}

void forward(const Binding& b, bool layer) {
  const DType type = b.input(0).dtype;
  const int64_t columns = b.columns(0), width = padded(columns), per_row = layer ? 2 : 1;
  const float epsilon = float(b.attributes().real("epsilon")), offset = float(offset_of(b));
  const auto run = [&](const float* x, const float* w, const float* bias, float* y, int64_t r, int64_t rows) {
    float* statistics = b.out<float>(1) + per_row * r;
    if (layer)
      layer_norm(x, w, bias, y, statistics, rows, columns, epsilon);
    else
      rms_norm(x, w, y, statistics, rows, columns, epsilon, offset);
  };
  if (!is_half(type))
    return b.threads().split(b.rows(0), 8, [&](int64_t r, int64_t e) {
      run(b.in<float>(0) + r * columns, b.in<float>(1), b.in<float>(2), b.out<float>(0) + r * columns, r, e - r);
    });
  float *w = b.workspace<float>(), *bias = w + width;
  to_f32(type, b.in<void>(1), w, columns);
  if (layer) to_f32(type, b.in<void>(2), bias, columns);
  b.threads().parallel([&](int t) {
    float *x = bias + (1 + 2 * t) * width, *y = x + width;
    for (int64_t r = b.rows(0) * t / b.threads().count(), e = b.rows(0) * (t + 1) / b.threads().count(); r < e; ++r) {
      to_f32(type, at(b.in<void>(0), type, r * columns), x, columns);
      run(x, w, bias, y, r, 1);
      from_f32(type, y, at(b.out<void>(0), type, r * columns), columns);
    }
  });
}

void backward(const Binding& b, bool layer) {
  const DType type = b.input(0).dtype;
  const int64_t columns = b.columns(0), width = padded(columns), stride = 2 * width, per_row = layer ? 2 : 1;
  const int64_t count = parts_of(b.rows(0));
  const float offset = float(offset_of(b));
  float *sums = b.workspace<float>(), *w = sums + count * stride;
  if (is_half(type)) to_f32(type, b.in<void>(2), w, columns);
  const auto part = [&](int t, int64_t p) {
    const int64_t first = b.rows(0) * p / count, end = b.rows(0) * (p + 1) / count;
    float* mine = sums + p * stride;
    std::fill_n(mine, stride, 0.0f);
    if (!is_half(type))
      return norm_gradient(b.in<float>(0) + first * columns, b.in<float>(1) + first * columns, b.in<float>(2),
                           b.in<float>(3) + first * per_row, b.out<float>(0) + first * columns, mine, mine + stride / 2,
                           end - first, columns, layer, b.accumulates(0), offset);
    float *dy = w + (1 + 3 * t) * width, *x = dy + width, *dx = x + width;
    for (int64_t r = first; r < end; ++r) {
      to_f32(type, at(b.in<void>(0), type, r * columns), dy, columns);
      to_f32(type, at(b.in<void>(1), type, r * columns), x, columns);
      if (b.accumulates(0)) to_f32(type, at(b.out<void>(0), type, r * columns), dx, columns);
      norm_gradient(dy, x, w, b.in<float>(3) + r * per_row, dx, mine, mine + stride / 2, 1, columns, layer,
                    b.accumulates(0), offset);
      from_f32(type, dx, at(b.out<void>(0), type, r * columns), columns);
    }
  };
  b.threads().parallel([&](int t) {
    for (int64_t p = count * t / b.threads().count(), e = count * (t + 1) / b.threads().count(); p < e; ++p) part(t, p);
  });
  b.threads().split(columns, 64, [&](int64_t i, int64_t e) {
    add_rows(sums + i, stride, count, b.out<float>(1) + i, e - i, b.accumulates(1));
    if (layer) add_rows(sums + stride / 2 + i, stride, count, b.out<float>(2) + i, e - i, b.accumulates(2));
  });
}

void register_norm(const std::string& name, bool layer) {
  const int inputs = layer ? 3 : 2, per_row = layer ? 2 : 1;
  register_kind(
      {.name = name,
       .summary = layer ? "x (…, C), w (C), b (C) -> y (…, C), statistics (rows, 2)"
                        : "x (…, C), w (C), [offset] -> y (…, C) = x/rms·(offset + w), statistics (rows, 1)",
       .shape = [=](const OpView& v) -> std::vector<TensorSpec> {
         bool right = v.inputs() == inputs && v.has_input(0) && is_float(v.input(0)) && v.attributes().has("epsilon") &&
                      !(layer && v.attributes().has("offset"));
         for (int i = 1; right && i < inputs; ++i)
           right = v.has_input(i) && v.input(i).shape == Shape{v.columns(0)} && v.input(i).dtype == v.input(0).dtype;
         require(
             right, v,
             layer ? "x (…, C), w (C), b (C) and an attribute epsilon" : "x (…, C), w (C) and an attribute epsilon");
         return {like(v.input(0)), {{v.rows(0), per_row}, wide(v.input(0).dtype)}};
       },
       .gradient =
           [=](Differentiation& d) {
             Attributes attributes;
             if (const Attributes& own = d.forward().attributes(); own.has("offset"))
               attributes.set("offset", own.real("offset"));
             const auto out = d.build().emit_all(
                 name + "_gradient", {d.output_gradient(0), d.input(0), d.input(1), d.output(1)}, attributes);
             for (int i = 0; i < inputs; ++i) d.set(i, out[i]);
           },
       .half = true,
       .sharding = {.dimensions = layer ? "...c, c, c -> ...c, (...)s" : "...c, c -> ...c, (...)s", .whole = "c"},
       .kernels = {{"cpu", cpu_kernel([layer](const Binding& b) { forward(b, layer); },
                                      [](const OpView& v, int threads) { return half_rows(v, threads, 2, 2); })},
                   {"reference", reference_kernel([layer](const Binding& b, auto zero) {
                      reference_norm<decltype(zero)>(b, layer);
                    })}}});
  register_kind(
      {.name = name + "_gradient",
       .summary = layer ? "dy, x, w, statistics -> dx, dw, db" : "dy, x, w, statistics -> dx, dw",
       .shape = [=](const OpView& v) -> std::vector<TensorSpec> {
         const bool right = v.inputs() == 4 && v.has_input(0) && v.has_input(1) && v.has_input(2) && v.has_input(3) &&
                            is_float(v.input(0)) && v.input(0).shape == v.input(1).shape &&
                            v.input(2).shape == Shape{v.columns(0)} && v.input(3).shape == Shape{v.rows(0), per_row};
         require(right, v, "dy and x (…, C), w (C) and the statistics of the forward op");
         const TensorSpec sums{v.input(2).shape, wide(v.input(2).dtype)};
         std::vector<TensorSpec> specs{like(v.input(0)), sums};
         if (layer) specs.push_back(sums);
         return specs;
       },
       .accumulates = uint16_t(layer ? 7 : 3),
       .in_place = {{0, 0}},
       .half = true,
       .sharding = {.dimensions = layer ? "...c, ...c, c, (...)s -> ...c, c, c" : "...c, ...c, c, (...)s -> ...c, c",
                    .whole = "c"},
       .kernels = {{"cpu", cpu_kernel([layer](const Binding& b) { backward(b, layer); },
                                      [](const OpView& v, int threads) {
                                        return parts_of(v.rows(0)) * 2 * padded(v.columns(0)) * 4 +
                                               half_rows(v, threads, 1, 3);
                                      })},
                   {"reference", reference_kernel([layer](const Binding& b, auto zero) {
                      reference_gradient<decltype(zero)>(b, layer);
                    })}}});
}

const AtLoad norm_registered([] {
  register_norm("layer_norm", true);
  register_norm("rms_norm", false);
});

}  // namespace
}  // namespace strata
