// Token and learned position embeddings, and rotary positions (Su et al., arXiv 2104.09864).
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "engine/ops/registration.h"
#include "engine/ops/rotary_angles.h"
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

template <class T>
void embed_row(const Binding& b, const OwnRows& own, const Indices& positions, int64_t row) {
  const int64_t columns = b.columns(1), time = b.input(0).shape[1], from = own(b.in<int32_t>(0)[row]);
  if (from < 0) return void(std::fill_n(b.out<T>(0) + row * columns, columns, T(0)));
  const T* w = b.in<T>(1) + from * columns;
  const T* p = b.has_input(2) ? b.in<T>(2) + positions(row % time) * columns : nullptr;
  T* x = b.out<T>(0) + row * columns;
  for (int64_t i = 0; i < columns; ++i) x[i] = w[i] + (p ? p[i] : T(0));
}

void embed_half_row(const Binding& b, const OwnRows& own, const Indices& positions, int64_t row) {
  constexpr int64_t kChunk = 512;
  const DType type = b.input(1).dtype;
  const int64_t columns = b.columns(1), time = b.input(0).shape[1], from = own(b.in<int32_t>(0)[row]);
  if (from < 0) return void(std::memset(at(b.out<void>(0), type, row * columns), 0, size_t(columns * size_of(type))));
  float x[kChunk], p[kChunk];
  for (int64_t i = 0; i < columns; i += kChunk) {
    const int64_t count = std::min(kChunk, columns - i);
    to_f32(type, at(b.in<void>(1), type, from * columns + i), x, count);
    if (b.has_input(2)) {
      to_f32(type, at(b.in<void>(2), type, positions(row % time) * columns + i), p, count);
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
  const Indices positions(b.input(0), 1);
  for (int64_t r = first; r < last; ++r)
    if (is_half(b.input(1).dtype))
      embed_half_row(b, own, positions, r);
    else
      embed_row<T>(b, own, positions, r);
}

std::vector<TensorSpec> embedding_shape(const OpView& v) {
  bool right = (v.inputs() == 2 || v.inputs() == 3) && v.has_input(0) && v.has_input(1) &&
               v.input(0).dtype == DType::i32 && v.input(0).shape.size() == 2 && v.input(1).shape.size() == 2 &&
               is_float(v.input(1));
  if (right && v.has_input(2))
    right = v.input(2).shape.size() == 2 && v.input(2).shape[1] == v.columns(1) &&
            v.input(2).shape[0] >= v.input(0).full_shape()[1] && v.input(2).dtype == v.input(1).dtype;
  require(right, v, "tokens i32 (B, T), w (V, C) and at most positions (P, C) with P >= T");
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
  if (d.needs(2))
    d.set(2, d.build().emit("position_gradient", {d.output_gradient(0)}, {{"rows", v.input(2).shape[0]}}));
}

void register_embedding() {
  register_kind(
      {.name = "embedding",
       .summary = "tokens i32 (B, T), w (V, C), [positions (P, C)] -> x (B, T, C)",
       .shape = embedding_shape,
       .gradient = embedding_gradients,
       .cost =
           [](const OpView& v) {
             return Cost{0,
                         3.0 * double(elements(v.input(0).shape) * v.columns(1)) * double(size_of(v.input(1).dtype))};
           },
       .half = true,
       // The rank that has a token's row adds its position too, so that the sum has it once.
       .sharding = {.dimensions = "bt, vc, pc -> btc", .whole = "p", .replaced = "v", .replace = with_split_rows},
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

void sum_by_position(const Binding& b) {
  const Shape& s = b.input(0).shape;
  if (!b.accumulates(0)) clear_output(b);
  b.threads().split(s[1], 8, [&, positions = Indices(b.input(0), 1)](int64_t t, int64_t e) {
    for (; t < e; ++t)
      for (int64_t n = 0; n < s[0]; ++n) add_row_to(b, b.out<float>(0) + positions(t) * s[2], n * s[1] + t, s[2]);
  });
}

void register_position_gradient() {
  register_kind({.name = "position_gradient",
                 .summary = "dx (B, T, C); attribute rows = P of the whole table -> dp (P, C), summed over B",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 1 && v.has_input(0) && is_float(v.input(0)) && v.input(0).shape.size() == 3 &&
                               v.attributes().has("rows") &&
                               v.attributes().integer("rows") >= v.input(0).full_shape()[1],
                           v, "dx (B, T, C) and an attribute rows >= T");
                   return {{{v.attributes().integer("rows"), v.columns(0)}, wide(v.input(0).dtype)}};
                 },
                 .accumulates = 1,
                 .half = true,
                 .sharding = {.dimensions = "btc -> pc"},
                 .kernels = {{"cpu", cpu_kernel(sum_by_position)},
                             {"reference", reference_kernel([](const Binding& b, auto zero) {
                                using T = decltype(zero);
                                const Shape& s = b.input(0).shape;
                                if (!b.accumulates(0)) std::fill_n(b.out<T>(0), elements(b.output(0).shape), T(0));
                                const Indices positions(b.input(0), 1);
                                for (int64_t i = 0; i < elements(s); ++i)
                                  b.out<T>(0)[positions(i / s[2] % s[1]) * s[2] + i % s[2]] += b.in<T>(0)[i];
                              })}}});
}

// cos and sin of the angles of the positions t that are here, (T, R/2) each, computed in double.
template <class T>
std::vector<T> rotary_table(int64_t time, const Indices& positions, const RotaryAngles& angles, bool inverse) {
  const int64_t half = angles.rotated / 2;
  std::vector<T> table(size_t(time * 2 * half));
  for (int64_t t = 0; t < time; ++t)
    for (int64_t i = 0; i < half; ++i) {
      const double angle = double(positions(t)) * angles.frequency(i), sine = angles.amplitude * std::sin(angle);
      table[t * 2 * half + i] = T(angles.amplitude * std::cos(angle));
      table[t * 2 * half + half + i] = T(inverse ? -sine : sine);
    }
  return table;
}

// Rotates 2·half numbers: pairs (i, i + half).
STRATA_SIMD void rotate(const float* x, float* y, const float* cosine, const float* sine, int64_t half) {
  simd::map(half, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
    const simd::F a = get(x + i, c), b = get(x + half + i, c), co = get(cosine + i, c), si = get(sine + i, c);
    put(y + i, a * co - b * si, c);
    put(y + half + i, b * co + a * si, c);
  });
}
void rotate(const double* x, double* y, const double* cosine, const double* sine, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const double a = x[i], b = x[half + i];
    y[i] = a * cosine[i] - b * sine[i];
    y[half + i] = b * cosine[i] + a * sine[i];
  }
}

// The table for one set of sizes, shared by all layers, microbatches and directions that are alive: a table of its own
// for each op would be hundreds of times as much memory, and none of it planned.
template <class T>
std::shared_ptr<const std::vector<T>> shared_rotary_table(int64_t time, const Indices& positions,
                                                          const RotaryAngles& angles, bool inverse) {
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, RotaryAngles, bool>;
  static std::mutex mutex;
  static std::map<Key, std::weak_ptr<const std::vector<T>>> tables;
  const std::lock_guard lock(mutex);
  auto& known = tables[{time, positions.first, positions.fold, positions.jump, angles, inverse}];
  auto table = known.lock();
  if (!table) known = table = std::make_shared<const std::vector<T>>(rotary_table<T>(time, positions, angles, inverse));
  return table;
}

// One head whose numbers have 16 bits, in f32 between.
constexpr int64_t kMostHead = 1024;
void rotate_half(const void* x, void* y, DType type, const float* cosine, const float* sine, int64_t half) {
  float from[kMostHead], to[kMostHead];
  to_f32(type, x, from, 2 * half);
  rotate(from, to, cosine, sine, half);
  from_f32(type, to, y, 2 * half);
}

template <class T>
Launch bind_rotary(const Binding& b) {
  const int64_t size = b.attributes().integer("head_size"), width = b.columns(0), heads = width / size,
                per_group = group_width(b) / size, time = b.input(0).shape[1];
  const DType type = b.input(0).dtype;
  require(!is_half(type) || size <= kMostHead, b, "heads of at most 1024 where numbers have 16 bits");
  const RotaryAngles angles_of(b.attributes());
  const int64_t half = angles_of.rotated / 2, rest = size - 2 * half;
  const auto table =
      shared_rotary_table<T>(time, Indices(b.input(0), 1), angles_of, b.attributes().integer("inverse") != 0);
  return [=] {
    b.threads().split(b.rows(0), 4, [&](int64_t r, int64_t e) {
      for (; r < e; ++r)
        for (int64_t h = 0; h < heads; ++h) {  // and keys and values
          const void* x = at(b.in<void>(0), type, r * width + h * size);
          void* y = at(b.out<void>(0), type, r * width + h * size);
          const T* angles = table->data() + r % time * 2 * half;
          if (h % per_group == per_group - 1) {
            if (x != y) std::memcpy(y, x, size_t(size * size_of(type)));  // a value head
            continue;
          }
          if (is_half(type)) {
            if constexpr (std::is_same_v<T, float>) rotate_half(x, y, type, angles, angles + half, half);
          } else {
            rotate(static_cast<const T*>(x), static_cast<T*>(y), angles, angles + half, half);
          }
          if (rest > 0 && x != y)
            std::memcpy(at(y, type, 2 * half), at(x, type, 2 * half), size_t(rest * size_of(type)));
        }
    });
  };
}

void register_rotary() {
  register_kind(
      {.name = "rotary",
       .summary = "x (B, T, K·(P+2)·D) -> query and key heads rotated by position; K groups of P queries, key, value",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         bool right = v.inputs() == 1 && v.has_input(0) && is_float(v.input(0)) && v.input(0).shape.size() == 3 &&
                      has_heads(v) && v.attributes().has("base");
         right = right && v.columns(0) % group_width(v) == 0;
         if (right) {
           const int64_t size = v.attributes().integer("head_size"), rotated = RotaryAngles(v.attributes()).rotated;
           right = rotated > 0 && rotated <= size && rotated % 2 == 0;
         }
         require(right, v,
                 "x (B, T, K·(P+2)·D) and attributes head_size = D, queries_per_group = P, rotated, even and at most D "
                 "(D when absent), base, inverse");
         return {like(v.input(0))};
       },
       .gradient =
           [](Differentiation& d) {
             Attributes attributes = d.forward().attributes();
             attributes.set("inverse", int64_t{1} - attributes.integer("inverse"));
             d.set(0, d.build().emit("rotary", {d.output_gradient(0)}, attributes));
           },
       .in_place = {{0, 0}},
       .half = true,
       .sharding = {.dimensions = "bth -> bth", .linear = 1},
       .kernels = {{"cpu", {bind_rotary<float>, {}}},
                   {"reference",
                    {[](const Binding& b) {
                       require(!is_half(compute_type(b)), b, "f32 or f64 tensors on the reference backend");
                       return compute_type(b) == DType::f64 ? bind_rotary<double>(b) : bind_rotary<float>(b);
                     },
                     {}}}}});
}

const AtLoad embedding_registered([] {
  register_embedding();
  register_embedding_gradient();
  register_position_gradient();
  register_rotary();
});

}  // namespace
}  // namespace strata
