// See matrix.h.
#include "plugins/lora/matrix.h"

#include <algorithm>

#include "strata/builder.h"
#include "strata/convert.h"

namespace strata::lora {
namespace {

bool is_float(DType type) { return type == DType::f32 || type == DType::f64 || is_half(type); }

// What both kinds are made from.
struct Shapes {
  Rows rows;
  int64_t rank, repeats;  // columns of b; how often the rows of all matrices repeat
  int64_t weight_rows() const { return repeats * rows.period(); }
  int64_t columns() const { return rank * int64_t(rows.chosen.size()); }
};

std::vector<TensorSpec> matrix_shape(const OpView& v) {
  const Rows rows = Rows::of(v.attributes());
  require(v.inputs() == 1 && v.has_input(0) && is_float(v.input(0).dtype) && v.input(0).shape.size() == 2 &&
              v.input(0).shape[0] % rows.adapted() == 0,
          v, "b (adapted rows, r)");
  const Shapes s{rows, v.columns(0), v.input(0).shape[0] / rows.adapted()};
  return {{{s.weight_rows(), s.columns()}, v.input(0).dtype}};
}

std::vector<TensorSpec> gradient_shape(const OpView& v) {
  const Rows rows = Rows::of(v.attributes());
  require(v.inputs() == 1 && v.has_input(0) && is_float(v.input(0).dtype) && v.input(0).shape.size() == 2 &&
              v.input(0).shape[0] % rows.period() == 0 && v.columns(0) % int64_t(rows.chosen.size()) == 0,
          v, "the gradient of what lora_matrix makes");
  return {{{v.input(0).shape[0] / rows.period() * rows.adapted(), v.columns(0) / int64_t(rows.chosen.size())},
           v.input(0).dtype}};
}

// Calls row(weight's row, its place) for the rows of the weight that this rank has. A split keeps what repeats
// together.
template <class Row>
void each_row(Threads& threads, const Shapes& s, Row row) {
  threads.split(s.weight_rows(), 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) row(i, s.rows.place_of(i));
  });
}

template <class T>
void scale_row(const void* from, int64_t from_at, void* to, int64_t to_at, int64_t count, double by, bool add) {
  for (int64_t j = 0; j < count; ++j) {
    T& out = static_cast<T*>(to)[to_at + j];
    out = (add ? out : T(0)) + T(by) * static_cast<const T*>(from)[from_at + j];
  }
}
void scale_half(const void* from, int64_t from_at, void* to, int64_t to_at, int64_t count, double by, DType type) {
  float values[256];
  for (int64_t j = 0; j < count; j += 256) {
    const int64_t some = std::min<int64_t>(256, count - j);
    to_f32(type, at(from, type, from_at + j), values, some);
    for (int64_t k = 0; k < some; ++k) values[k] *= float(by);
    from_f32(type, values, at(to, type, to_at + j), some);
  }
}
void scale(const void* from, int64_t from_at, void* to, int64_t to_at, int64_t count, double by, bool add, DType type) {
  if (type == DType::f64)
    scale_row<double>(from, from_at, to, to_at, count, by, add);
  else if (type == DType::f32)
    scale_row<float>(from, from_at, to, to_at, count, by, add);
  else
    scale_half(from, from_at, to, to_at, count, by, type);
}

Launch bind_matrix(const Binding& b) {
  const Rows rows = Rows::of(b.attributes());
  const Shapes s{rows, b.columns(0), b.input(0).shape[0] / rows.adapted()};
  const DType type = b.input(0).dtype;
  return [=, by = b.attributes().real("scale")] {
    each_row(b.threads(), s, [&](int64_t i, const Rows::Place& place) {
      auto* const row = static_cast<std::byte*>(at(b.out<void>(0), type, i * s.columns()));
      std::fill_n(row, s.columns() * size_of(type), std::byte{0});
      if (place.row >= 0)
        scale(b.in<void>(0), place.row * s.rank, row, place.adapter * s.rank, s.rank, by, false, type);
    });
  };
}

Launch bind_gradient(const Binding& b) {
  const Rows rows = Rows::of(b.attributes());
  const Shapes s{rows, b.output(0).shape[1], b.input(0).shape[0] / rows.period()};
  const DType type = b.input(0).dtype;
  require(!is_half(type), b, "a gradient of f32 or f64");
  return [=, by = b.attributes().real("scale")] {
    each_row(b.threads(), s, [&](int64_t i, const Rows::Place& place) {
      if (place.row >= 0)
        scale(b.in<void>(0), i * s.columns() + place.adapter * s.rank, b.out<void>(0), place.row * s.rank, s.rank, by,
              b.accumulates(0), type);
    });
  };
}

}  // namespace

void register_matrix_kinds() {
  static const bool once = [] {
    register_kind(
        {.name = "lora_matrix",
         .summary = "b (adapted rows, r) -> (rows of the weight, r · adapters), times the attribute scale",
         .shape = matrix_shape,
         .gradient =
             [](Differentiation& d) {
               d.set(0, d.build().emit("lora_matrix_gradient", {d.output_gradient(0)}, d.forward().attributes()));
             },
         .half = true,
         .sharding = {.dimensions = "or -> os", .whole = "rs"},
         .kernels = {{"cpu", {bind_matrix, {}}}, {"reference", {bind_matrix, {}}}}});
    register_kind({.name = "lora_matrix_gradient",
                   .summary = "dy (rows of the weight, r · adapters) -> db (adapted rows, r)",
                   .shape = gradient_shape,
                   .accumulates = 1,
                   .sharding = {.dimensions = "os -> or", .whole = "rs", .linear = 1},
                   .kernels = {{"cpu", {bind_gradient, {}}}, {"reference", {bind_gradient, {}}}}});
    return true;
  }();
  (void)once;
}

}  // namespace strata::lora
