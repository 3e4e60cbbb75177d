// Products of groups of rows with matrices of their own (Gale et al., arXiv 2211.15841): the linear layers of experts.
// Rows come sorted by expert; offsets (E + 1) say where the rows of each begin and end. All experts' matrices are one
// tensor (E·C, F), expert e's from row e·C on, in the layers from C to F and back alike. Rows behind the last expert's
// belong to nobody and become zero.
//
// How the work is cut depends on sizes alone, and what is summed over is never cut, so that results have the same bits
// for any number of threads.
#include <atomic>
#include <cstring>

#include "engine/ops/gemm.h"
#include "engine/ops/registration.h"

namespace strata::grouped_linear {
namespace {

constexpr int64_t kPiece = 256;  // columns, or rows, of a result that one task makes
constexpr int64_t kPanel = 256;  // numbers of 16 bits become f32 in panels of as many rows, columns and depth
constexpr int64_t kPanelBytes = kPanel * kPanel * 4;

int64_t experts_of(const Tensor& offsets) { return offsets.shape[0] - 1; }

struct Factor {
  const void* data;
  int64_t stride;  // between rows as stored
  Transpose transpose;
};

// C (m, n) = op(A) op(B) [+ C], all of it by one thread.
struct Product {
  int64_t m, n, k;
  Factor a, b;
  void* c;
  int64_t c_stride;
  DType type, result;
  bool accumulate;
};

// Rows [i, i + m), columns [j, j + n) of op(factor) as f32 in the layout in which it is stored, rows kPanel apart.
void copy_panel(const Factor& f, DType type, int64_t i, int64_t m, int64_t j, int64_t n, float* to) {
  if (f.transpose == Transpose::yes) std::swap(i, j), std::swap(m, n);
  for (int64_t r = 0; r < m; ++r) to_f32(type, at(f.data, type, (i + r) * f.stride + j), to + r * kPanel, n);
}

void multiply_half(const Product& p, float* panels) {
  float *const a = panels, *const b = a + kPanel * kPanel, *const c = b + kPanel * kPanel;
  for (int64_t i = 0; i < p.m; i += kPanel)
    for (int64_t j = 0; j < p.n; j += kPanel) {
      const int64_t m = std::min(kPanel, p.m - i), n = std::min(kPanel, p.n - j);
      const auto row = [&](int64_t r) { return at(p.c, p.result, (i + r) * p.c_stride + j); };
      for (int64_t r = 0; r < m; ++r)
        if (p.accumulate)
          to_f32(p.result, row(r), c + r * kPanel, n);
        else
          std::memset(c + r * kPanel, 0, size_t(n) * 4);
      for (int64_t l = 0; l < p.k; l += kPanel) {
        const int64_t k = std::min(kPanel, p.k - l);
        copy_panel(p.a, p.type, i, m, l, k, a);
        copy_panel(p.b, p.type, l, k, j, n, b);
        gemm(p.a.transpose, p.b.transpose, m, n, k, a, kPanel, b, kPanel, 1.0f, c, kPanel);
      }
      for (int64_t r = 0; r < m; ++r) from_f32(p.result, c + r * kPanel, row(r), n);
    }
}

void multiply(const Product& p, float* panels) {
  if (p.m == 0 || p.n == 0) return;
  if (is_half(p.type)) return multiply_half(p, panels);
  auto* const c = static_cast<float*>(p.c);
  if (p.k == 0) {
    for (int64_t r = 0; r < p.m && !p.accumulate; ++r) std::memset(c + r * p.c_stride, 0, size_t(p.n) * 4);
    return;
  }
  gemm(p.a.transpose, p.b.transpose, p.m, p.n, p.k, static_cast<const float*>(p.a.data), p.a.stride,
       static_cast<const float*>(p.b.data), p.b.stride, p.accumulate ? 1.0f : 0.0f, c, p.c_stride);
}

int64_t workspace_of(const OpView& v, int threads) { return is_half(compute_type(v)) ? threads * 3 * kPanelBytes : 0; }

// Calls task(i, panels) for i in [0, count), each on one thread with panels of its own.
template <class Task>
void each_task(const Binding& b, int64_t count, Task&& task) {
  std::atomic<int64_t> next{0};
  auto* const workspace = b.workspace<char>();
  b.threads().parallel([&](int thread) {
    auto* const panels = reinterpret_cast<float*>(workspace ? workspace + thread * 3 * kPanelBytes : nullptr);
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(i, panels);
  });
}

// y (S, out) from x (S, in): expert by expert, pieces of the columns of y. `transpose`: w (E·C, F) goes from F to C.
void run_groups(const Binding& b, Transpose transpose) {
  const Tensor &x = b.input(0), &w = b.input(1), &y = b.output(0);
  const int64_t in = x.shape[1], out = y.shape[1], columns = w.shape[1], rows = w.shape[0] / experts_of(b.input(2));
  const int64_t pieces = (out + kPiece - 1) / kPiece, experts = experts_of(b.input(2));
  const int32_t* offsets = b.in<int32_t>(2);
  each_task(b, experts * pieces, [&](int64_t task, float* panels) {
    const int64_t e = task / pieces, j = task % pieces * kPiece, from = offsets[e];
    const int64_t weight = e * rows * columns + (transpose == Transpose::yes ? j * columns : j);
    multiply({.m = offsets[e + 1] - from,
              .n = std::min(kPiece, out - j),
              .k = in,
              .a = {at(b.in<void>(0), x.dtype, from * in), in, Transpose::no},
              .b = {at(b.in<void>(1), w.dtype, weight), columns, transpose},
              .c = at(b.out<void>(0), y.dtype, from * out + j),
              .c_stride = out,
              .type = x.dtype,
              .result = y.dtype,
              .accumulate = b.accumulates(0)},
             panels);
  });
  const int64_t end = offsets[experts], bytes = out * size_of(y.dtype);
  if (!b.accumulates(0)) std::memset(at(b.out<void>(0), y.dtype, end * out), 0, size_t((y.shape[0] - end) * bytes));
}

// dw (E·C, F) = for each expert the transpose of its rows of a (S, C) times those of b (S, F); pieces of rows.
void run_weight_gradient(const Binding& b) {
  const Tensor &left = b.input(0), &right = b.input(1), &dw = b.output(0);
  const int64_t m = left.shape[1], n = right.shape[1], pieces = (m + kPiece - 1) / kPiece;
  const int32_t* offsets = b.in<int32_t>(2);
  each_task(b, experts_of(b.input(2)) * pieces, [&](int64_t task, float* panels) {
    const int64_t e = task / pieces, i = task % pieces * kPiece, from = offsets[e];
    multiply({.m = std::min(kPiece, m - i),
              .n = n,
              .k = offsets[e + 1] - from,
              .a = {at(b.in<void>(0), left.dtype, from * m + i), m, Transpose::yes},
              .b = {at(b.in<void>(1), right.dtype, from * n), n, Transpose::no},
              .c = at(b.out<void>(0), dw.dtype, (e * m + i) * n),
              .c_stride = n,
              .type = left.dtype,
              .result = dw.dtype,
              .accumulate = b.accumulates(0)},
             panels);
  });
}

// Plain loops. `transpose` as above.
template <class T>
void plain_groups(const Binding& b, bool transpose) {
  const int64_t in = b.columns(0), out = b.output(0).shape[1], columns = b.columns(1);
  const int64_t experts = experts_of(b.input(2)), rows = b.input(1).shape[0] / experts;
  const int32_t* offsets = b.in<int32_t>(2);
  const T *x = b.in<T>(0), *w = b.in<T>(1);
  T* y = b.out<T>(0);
  for (int64_t s = 0, e = 0; s < b.input(0).shape[0]; ++s) {
    while (e < experts && s >= offsets[e + 1]) ++e;
    for (int64_t o = 0; o < out; ++o) {
      T sum = b.accumulates(0) ? y[s * out + o] : T(0);
      for (int64_t i = 0; i < in && e < experts; ++i)
        sum += x[s * in + i] * w[transpose ? (e * rows + o) * columns + i : (e * rows + i) * columns + o];
      y[s * out + o] = sum;
    }
  }
}

template <class T>
void plain_weight_gradient(const Binding& b) {
  const int64_t m = b.columns(0), n = b.columns(1);
  const int32_t* offsets = b.in<int32_t>(2);
  for (int64_t e = 0; e < experts_of(b.input(2)); ++e)
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        T& to = b.out<T>(0)[(e * m + i) * n + j];
        T sum = b.accumulates(0) ? to : T(0);
        for (int64_t s = offsets[e]; s < offsets[e + 1]; ++s) sum += b.in<T>(0)[s * m + i] * b.in<T>(1)[s * n + j];
        to = sum;
      }
}

bool are_offsets(const Tensor& t) { return t.dtype == DType::i32 && t.shape.size() == 1 && t.shape[0] >= 2; }
bool is_matrix(const OpView& v, int i) {
  return v.has_input(i) && is_float(v.input(i)) && v.input(i).shape.size() == 2 && v.input(i).dtype == v.input(0).dtype;
}

TensorSpec group_shape(const OpView& v, bool transpose) {
  bool right = v.inputs() == 3 && is_matrix(v, 0) && is_matrix(v, 1) && v.has_input(2) && are_offsets(v.input(2)) &&
               v.input(1).shape[0] % experts_of(v.input(2)) == 0;
  const int64_t rows = right ? v.input(1).shape[0] / experts_of(v.input(2)) : 0;
  right = right && v.columns(0) == (transpose ? v.columns(1) : rows);
  require(right, v,
          transpose ? "x (S, F), w (E·C, F) and offsets i32 (E + 1)" : "x (S, C), w (E·C, F) and offsets i32 (E + 1)");
  return {{v.input(0).shape[0], transpose ? rows : v.columns(1)}, v.input(0).dtype};
}

Cost group_cost(const OpView& v, double c, double f) {
  Cost cost{2 * double(v.input(0).shape[0]) * c * f, double(v.output(0).bytes()) * (v.accumulates(0) ? 2 : 1)};
  for (int i = 0; i < v.inputs(); ++i) cost.bytes += double(v.input(i).bytes());
  return cost;
}

// What becomes of a row is a product with w; of dy it is one with w the other way.
void gradients(Differentiation& d, bool transpose) {
  const TensorId dy = d.output_gradient(0), offsets = d.input(2);
  const auto weight = [&](TensorId c, TensorId f) {
    return d.build().emit("grouped_linear_weight_gradient", {c, f, offsets});
  };
  if (d.needs(1)) d.set(1, transpose ? weight(dy, d.input(0)) : weight(d.input(0), dy));
  if (d.needs(0))
    d.set(0, d.build().emit(transpose ? "grouped_linear" : "grouped_linear_transposed", {dy, d.input(1), offsets}));
}

void register_groups(bool transpose) {
  register_kind(
      {.name = transpose ? "grouped_linear_transposed" : "grouped_linear",
       .summary = transpose ? "x (S, F), w (E·C, F), offsets i32 (E + 1) -> y (S, C): rows of expert e times w[e]ᵀ"
                            : "x (S, C), w (E·C, F), offsets i32 (E + 1) -> y (S, F): rows of expert e times w[e]",
       .shape = [=](const OpView& v) -> std::vector<TensorSpec> { return {group_shape(v, transpose)}; },
       .gradient = [=](Differentiation& d) { gradients(d, transpose); },
       .cost =
           [](const OpView& v) {
             return group_cost(v, double(v.input(1).shape[0] / experts_of(v.input(2))), double(v.columns(1)));
           },
       .accumulates = 1,
       .half = true,
       .sharding = {.dimensions = transpose ? "sf, rf, e -> sc" : "sc, rf, e -> sf", .whole = "scre", .linear = 1},
       .kernels = {{"cpu", cpu_kernel([=](const Binding& b) { run_groups(b, Transpose(transpose)); }, workspace_of)},
                   {"reference", reference_kernel([=](const Binding& b, auto zero) {
                      plain_groups<decltype(zero)>(b, transpose);
                    })}}});
}

void register_weight_gradient() {
  register_kind(
      {.name = "grouped_linear_weight_gradient",
       .summary = "a (S, C), b (S, F), offsets i32 (E + 1) -> dw (E·C, F): of expert e its rows of aᵀ times those of b",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         require(v.inputs() == 3 && is_matrix(v, 0) && is_matrix(v, 1) && v.input(0).shape[0] == v.input(1).shape[0] &&
                     v.has_input(2) && are_offsets(v.input(2)),
                 v, "a (S, C), b (S, F) and offsets i32 (E + 1)");
         return {{{elements({experts_of(v.input(2)), v.columns(0)}), v.columns(1)}, wide(v.input(0).dtype)}};
       },
       .cost = [](const OpView& v) { return group_cost(v, double(v.columns(0)), double(v.columns(1))); },
       .accumulates = 1,
       .half = true,
       .sharding = {.dimensions = "sc, sf, e -> rf", .whole = "sce"},
       .kernels = {{"cpu", cpu_kernel(run_weight_gradient, workspace_of)},
                   {"reference",
                    reference_kernel([](const Binding& b, auto zero) { plain_weight_gradient<decltype(zero)>(b); })}}});
}

const AtLoad grouped_linear_registered([] {
  register_groups(false);
  register_groups(true);
  register_weight_gradient();
});

}  // namespace
}  // namespace strata::grouped_linear
