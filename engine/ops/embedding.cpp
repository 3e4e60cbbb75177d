// Token and learned position embeddings.
#include <algorithm>
#include <cstring>

#include "engine/ops/registration.h"
#include "engine/ops/shares.h"
#include "engine/ops/vector.h"
#include "strata/layout.h"

namespace strata {
namespace {

using simd::get;
using simd::put;

STRATA_SIMD void add_to(float* sum, const float* x, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { put(sum + i, get(sum + i, c) + get(x + i, c), c); });
}

// Rows of a table over which an axis splits the vocabulary: tokens of other rows are other ranks', here they are zeros.
struct OwnRows {
  int64_t first, count;
  OwnRows(const Tensor& table) : first(first_row(table)), count(table.shape[0]) {}
  // The row of a token, or -1.
  int64_t operator()(int32_t token) const {
    const int64_t row = token - first;
    return row >= 0 && row < count ? row : -1;
  }
};

// The row of learned positions of a row of tokens: by where in the sequence it is, or with input 3 by where in its
// document (embedding; a place for each token), or by where the sequence goes on (embedding_from).
struct Positions {
  Indices here;
  int64_t time, last;
  const int32_t *documents = nullptr, *from = nullptr;
  Positions(const Binding& b)
      : here(b.input(0), 1), time(b.input(0).shape[1]), last(b.has_input(2) ? b.input(2).shape[0] - 1 : 0) {
    if (b.has_input(3)) (b.input(3).shape.size() == 2 ? documents : from) = b.in<int32_t>(3);
  }
  int64_t operator()(int64_t row) const {
    if (documents) return std::clamp<int64_t>(here(row % time) - documents[row], 0, last);
    return from ? std::clamp<int64_t>(from[row / time] + row % time, 0, last) : here(row % time);
  }
};

template <class T>
void embed_row(const Binding& b, const OwnRows& own, const Positions& positions, int64_t row) {
  const int64_t columns = b.columns(1), from = own(b.in<int32_t>(0)[row]);
  if (from < 0) return void(std::fill_n(b.out<T>(0) + row * columns, columns, T(0)));
  const T* w = b.in<T>(1) + from * columns;
  const T* p = b.has_input(2) ? b.in<T>(2) + positions(row) * columns : nullptr;
  T* x = b.out<T>(0) + row * columns;
  for (int64_t i = 0; i < columns; ++i) x[i] = w[i] + (p ? p[i] : T(0));
}

void embed_half_row(const Binding& b, const OwnRows& own, const Positions& positions, int64_t row) {
  constexpr int64_t kChunk = 512;
  const DType type = b.input(1).dtype;
  const int64_t columns = b.columns(1), from = own(b.in<int32_t>(0)[row]);
  if (from < 0) return void(std::memset(at(b.out<void>(0), type, row * columns), 0, size_t(columns * size_of(type))));
  float x[kChunk], p[kChunk];
  for (int64_t i = 0; i < columns; i += kChunk) {
    const int64_t count = std::min(kChunk, columns - i);
    to_f32(type, at(b.in<void>(1), type, from * columns + i), x, count);
    if (b.has_input(2)) {
      to_f32(type, at(b.in<void>(2), type, positions(row) * columns + i), p, count);
      add_to(x, p, count);
    }
    from_f32(type, x, at(b.out<void>(0), type, row * columns + i), count);
  }
}

// sum (n) += row `row` of the first input.
void add_row_to(const Binding& b, float* sum, int64_t row, int64_t columns) {
  constexpr int64_t kChunk = 512;
  const DType type = b.input(0).dtype;
  if (!is_half(type)) return add_to(sum, b.in<float>(0) + row * columns, columns);
  float x[kChunk];
  for (int64_t i = 0; i < columns; i += kChunk) {
    const int64_t count = std::min(kChunk, columns - i);
    to_f32(type, at(b.in<void>(0), type, row * columns + i), x, count);
    add_to(sum + i, x, count);
  }
}

// The axis that splits the rows is named in the op, and in its gradient's, whose result is split so.
std::vector<TensorId> with_split_rows(Builder& build, const OpView& v, const std::string& axis, int size) {
  Attributes attributes = v.attributes();
  attributes.set("axis", axis);
  attributes.set("size", int64_t(size));
  return {build.emit("embedding", v.op().inputs, attributes, "embedding.own")};
}

template <class T>
void embed(const Binding& b, int64_t first, int64_t last) {
  const OwnRows own(b.input(1));
  const Positions positions(b);
  for (int64_t r = first; r < last; ++r)
    if (is_half(b.input(1).dtype))
      embed_half_row(b, own, positions, r);
    else
      embed_row<T>(b, own, positions, r);
}

std::vector<TensorSpec> embedding_shape(const OpView& v) {
  bool right = v.inputs() >= 2 && v.inputs() <= 4 && v.has_input(0) && v.has_input(1) &&
               v.input(0).dtype == DType::i32 && v.input(0).shape.size() == 2 && v.input(1).shape.size() == 2 &&
               is_float(v.input(1));
  if (right && v.has_input(2))
    right = v.input(2).shape.size() == 2 && v.input(2).shape[1] == v.columns(1) &&
            v.input(2).shape[0] >= v.input(0).full_shape()[1] && v.input(2).dtype == v.input(1).dtype;
  if (right && v.inputs() == 4)
    right = v.has_input(2) && v.has_input(3) && v.input(3).dtype == DType::i32 && v.input(3).shape == v.input(0).shape;
  require(right, v,
          "tokens i32 (B, T), w (V, C) and at most positions (P, C) with P >= T, and with those the places where "
          "documents begin i32 (B, T)");
  return {{{v.input(0).shape[0], v.input(0).shape[1], v.columns(1)}, v.input(1).dtype}};
}

// The gradients' `rows` are those of the whole table, which a split leaves as they are.
void embedding_gradients(Differentiation& d) {
  const OpView& v = d.forward();
  if (d.needs(1)) {
    Attributes rows = v.attributes();  // the axis that splits the rows, if one does
    const Split* split = rows.has("axis") ? last_split(v.input(1), 0, rows.string("axis")) : nullptr;
    rows.set("rows", split ? split->full : v.input(1).shape[0]);
    d.set(1, d.build().emit("embedding_gradient", {d.output_gradient(0), d.input(0)}, rows));
  }
  if (d.needs(2)) {
    std::vector<TensorId> inputs{d.output_gradient(0)};
    if (v.has_input(3)) inputs.push_back(d.input(3));
    d.set(2, d.build().emit("position_gradient", inputs, {{"rows", v.input(2).shape[0]}}));
  }
}

void register_embedding() {
  register_kind(
      {.name = "embedding",
       .summary = "tokens i32 (B, T), w (V, C), [positions (P, C), [where documents begin i32 (B, T)]] -> x (B, T, C)",
       .shape = embedding_shape,
       .gradient = embedding_gradients,
       .cost =
           [](const OpView& v) {
             return Cost{0,
                         3.0 * double(elements(v.input(0).shape) * v.columns(1)) * double(size_of(v.input(1).dtype))};
           },
       .half = true,
       // The rank that has a token's row adds its position too, so that the sum has it once.
       .sharding = {.dimensions = "bt, vc, pc, bt -> btc", .whole = "p", .replaced = "v", .replace = with_split_rows},
       .kernels = {{"cpu", cpu_kernel([](const Binding& b) {
                      b.threads().split(elements(b.input(0).shape), 16,
                                        [&](int64_t r, int64_t e) { embed<float>(b, r, e); });
                    })},
                   {"reference", reference_kernel([](const Binding& b, auto zero) {
                      embed<decltype(zero)>(b, 0, elements(b.input(0).shape));
                    })}}});
}

// Of some next tokens of sequences, each of which goes on at a position of its own.
void register_embedding_from() {
  register_kind({.name = "embedding_from",
                 .summary = "tokens i32 (B, T), w (V, C), positions (P, C), first i32 (B) -> x (B, T, C), of positions "
                            "first to first + T - 1",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 4 && v.has_input(0) && v.has_input(1) && v.has_input(2) && v.has_input(3) &&
                               v.input(0).dtype == DType::i32 && v.input(0).shape.size() == 2 &&
                               v.input(1).shape.size() == 2 && is_float(v.input(1)) && v.input(2).shape.size() == 2 &&
                               v.columns(1) == v.columns(2) && v.input(2).dtype == v.input(1).dtype &&
                               v.input(3).dtype == DType::i32 && v.input(3).shape == Shape{v.input(0).shape[0]},
                           v, "tokens i32 (B, T), w (V, C), positions (P, C) and first i32 (B)");
                   return {{{v.input(0).shape[0], v.input(0).shape[1], v.columns(1)}, v.input(1).dtype}};
                 },
                 .cost =
                     [](const OpView& v) {
                       return Cost{0, 3.0 * double(elements(v.input(0).shape) * v.columns(1)) *
                                          double(size_of(v.input(1).dtype))};
                     },
                 .half = true,
                 .kernels = {{"cpu", cpu_kernel([](const Binding& b) {
                                b.threads().split(elements(b.input(0).shape), 16,
                                                  [&](int64_t r, int64_t e) { embed<float>(b, r, e); });
                              })},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                embed<decltype(zero)>(b, 0, elements(b.input(0).shape));
                              })}}});
}

// Rows of a table's gradient on this rank.
int64_t own_rows(const OpView& v) {
  const int64_t rows = v.attributes().integer("rows");
  if (!v.attributes().has("axis")) return rows;
  return share_of_output(v, 0, 0, v.attributes().string("axis"), rows, int(v.attributes().integer("size")));
}

void clear_output(const Binding& b) {
  b.threads().split(elements(b.output(0).shape), kGrain,
                    [&](int64_t i, int64_t e) { std::memset(b.out<float>(0) + i, 0, size_t(e - i) * 4); });
}

// Every thread owns the rows of the tokens that are its own modulo the team: no two write one row, and each row is
// summed in the order of the tokens whatever the number of threads.
void sum_by_token(const Binding& b) {
  const int64_t columns = b.columns(0), rows = b.rows(0);
  const OwnRows own(b.output(0));
  float* dw = b.out<float>(0);
  if (!b.accumulates(0)) clear_output(b);
  b.threads().parallel([&](int t) {
    for (int64_t r = 0; r < rows; ++r)
      if (const int64_t row = own(b.in<int32_t>(1)[r]); row >= 0 && row % b.threads().count() == t)
        add_row_to(b, dw + row * columns, r, columns);
  });
}

void register_embedding_gradient() {
  register_kind(
      {.name = "embedding_gradient",
       .summary = "dx (B, T, C), tokens i32 (B, T); attribute rows = V of the whole table -> dw (V, C)",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         require(v.inputs() == 2 && v.has_input(0) && v.has_input(1) && is_float(v.input(0)) &&
                     v.input(1).dtype == DType::i32 && v.rows(0) == elements(v.input(1).shape) &&
                     v.attributes().has("rows"),
                 v, "dx (B, T, C), tokens i32 (B, T) and an attribute rows");
         return {{{own_rows(v), v.columns(0)}, wide(v.input(0).dtype)}};
       },
       .cost =
           [](const OpView& v) {
             return Cost{0, 3.0 * double(v.input(0).bytes()) + (v.accumulates(0) ? 0.0 : double(v.output(0).bytes()))};
           },
       .accumulates = 1,
       .half = true,
       .layout = [](const OpView& v) -> std::vector<Layout> {
         if (!v.attributes().has("axis")) return {{}};
         return {with_split({}, 0, v.attributes().string("axis"), v.attributes().integer("rows"))};
       },
       .sharding = {.dimensions = "btc, bt -> vc", .whole = "c"},
       .kernels = {{"cpu", cpu_kernel(sum_by_token)}, {"reference", reference_kernel([](const Binding& b, auto zero) {
                                                         using T = decltype(zero);
                                                         const int64_t columns = b.columns(0);
                                                         const OwnRows own(b.output(0));
                                                         if (!b.accumulates(0))
                                                           std::fill_n(b.out<T>(0), elements(b.output(0).shape), T(0));
                                                         for (int64_t r = 0; r < b.rows(0); ++r)
                                                           if (const int64_t row = own(b.in<int32_t>(1)[r]); row >= 0)
                                                             for (int64_t i = 0; i < columns; ++i)
                                                               b.out<T>(0)[row * columns + i] +=
                                                                   b.in<T>(0)[r * columns + i];
                                                       })}}});
}

bool has_documents(const OpView& v) { return v.inputs() > 1; }  // of position_gradient

// The row of positions of a token of packed documents.
int64_t position_of(const Binding& b, const Indices& here, int64_t row) {
  const int64_t at = here(row % b.input(0).shape[1]) - b.in<int32_t>(1)[row];
  return std::clamp<int64_t>(at, 0, b.output(0).shape[0] - 1);
}

void sum_by_position(const Binding& b) {
  const Shape& s = b.input(0).shape;
  if (!b.accumulates(0)) clear_output(b);
  if (has_documents(b))  // as sum_by_token does
    return b.threads().parallel([&, here = Indices(b.input(0), 1)](int t) {
      for (int64_t r = 0; r < s[0] * s[1]; ++r)
        if (const int64_t row = position_of(b, here, r); row % b.threads().count() == t)
          add_row_to(b, b.out<float>(0) + row * s[2], r, s[2]);
    });
  b.threads().split(s[1], 8, [&, positions = Indices(b.input(0), 1)](int64_t t, int64_t e) {
    for (; t < e; ++t)
      for (int64_t n = 0; n < s[0]; ++n) add_row_to(b, b.out<float>(0) + positions(t) * s[2], n * s[1] + t, s[2]);
  });
}

void register_position_gradient() {
  register_kind(
      {.name = "position_gradient",
       .summary = "dx (B, T, C), [where documents begin i32 (B, T)]; attribute rows = P of the whole table -> "
                  "dp (P, C), summed over B",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         bool right = v.has_input(0) && is_float(v.input(0)) && v.input(0).shape.size() == 3 &&
                      v.attributes().has("rows") && v.attributes().integer("rows") >= v.input(0).full_shape()[1];
         if (right && has_documents(v))
           right = v.has_input(1) && v.input(1).dtype == DType::i32 &&
                   v.input(1).shape == Shape{v.input(0).shape[0], v.input(0).shape[1]};
         require(right, v,
                 "dx (B, T, C), at most the places where documents begin i32 (B, T), and an attribute rows "
                 ">= T");
         return {{{v.attributes().integer("rows"), v.columns(0)}, wide(v.input(0).dtype)}};
       },
       .accumulates = 1,
       .half = true,
       .sharding = {.dimensions = "btc, bt -> pc"},
       .kernels = {{"cpu", cpu_kernel(sum_by_position)},
                   {"reference", reference_kernel([](const Binding& b, auto zero) {
                      using T = decltype(zero);
                      const Shape& s = b.input(0).shape;
                      if (!b.accumulates(0)) std::fill_n(b.out<T>(0), elements(b.output(0).shape), T(0));
                      const Indices positions(b.input(0), 1);
                      for (int64_t i = 0; i < elements(s); ++i) {
                        const int64_t row = i / s[2];
                        const int64_t at = has_documents(b) ? position_of(b, positions, row) : positions(row % s[1]);
                        b.out<T>(0)[at * s[2] + i % s[2]] += b.in<T>(0)[i];
                      }
                    })}}});
}

const AtLoad embedding_registered([] {
  register_embedding();
  register_embedding_gradient();
  register_position_gradient();
  register_embedding_from();
});

}  // namespace
}  // namespace strata
