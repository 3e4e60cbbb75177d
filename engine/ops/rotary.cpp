// Rotary positions (Su et al., arXiv 2104.09864): of whole sequences, and of tokens with which sequences go on.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "engine/ops/registration.h"
#include "engine/ops/rotary_angles.h"
#include "engine/ops/vector.h"
#include "strata/layout.h"

namespace strata::rotary {
namespace {

using simd::get;
using simd::put;

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

// With input 1 each sequence goes on at a position of its own, below attribute "positions" (rotary_from), or each token
// counts from where its document begins (rotary).
template <class T>
Launch bind_rotary(const Binding& b) {
  const int64_t size = b.attributes().integer("head_size"), width = b.columns(0), heads = width / size,
                per_group = group_width(b) / size, time = b.input(0).shape[1];
  const bool goes_on = b.attributes().has("positions"), packed = b.has_input(1) && !goes_on;
  // Of documents the table has every position, of which some may be on other ranks.
  const int64_t rows = goes_on ? b.attributes().integer("positions") : packed ? b.input(0).full_shape()[1] : time;
  const Indices here(b.input(0), 1);
  const DType type = b.input(0).dtype;
  require(!is_half(type) || size <= kMostHead, b, "heads of at most 1024 where numbers have 16 bits");
  const RotaryAngles angles_of(b.attributes());
  const int64_t half = angles_of.rotated / 2, rest = size - 2 * half;
  const auto table = shared_rotary_table<T>(rows, goes_on || packed ? Indices() : here, angles_of,
                                            b.attributes().integer("inverse") != 0);
  return [=] {
    b.threads().split(b.rows(0), 4, [&](int64_t r, int64_t e) {
      for (; r < e; ++r) {
        int64_t at_row = r % time;
        if (goes_on) at_row = std::clamp<int64_t>(b.in<int32_t>(1)[r / time] + at_row, 0, rows - 1);
        if (packed) at_row = std::clamp<int64_t>(here(at_row) - b.in<int32_t>(1)[r], 0, rows - 1);
        for (int64_t h = 0; h < heads; ++h) {  // and keys and values
          const void* x = at(b.in<void>(0), type, r * width + h * size);
          void* y = at(b.out<void>(0), type, r * width + h * size);
          const T* angles = table->data() + at_row * 2 * half;
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
      }
    });
  };
}

// What both kinds ask of their input and attributes.
void check(const OpView& v) {
  bool right = v.has_input(0) && is_float(v.input(0)) && v.input(0).shape.size() == 3 && has_heads(v) &&
               v.attributes().has("base");
  right = right && v.columns(0) % group_width(v) == 0;
  if (right) {
    const int64_t size = v.attributes().integer("head_size"), rotated = RotaryAngles(v.attributes()).rotated;
    right = rotated > 0 && rotated <= size && rotated % 2 == 0;
  }
  require(
      right, v,
      "x (B, T, K·(P+2)·D) and attributes head_size = D, queries_per_group = P, rotated, even and at most D (D when "
      "absent), base, inverse");
}

std::map<std::string, Kernel, std::less<>> kernels() {
  return {{"cpu", {bind_rotary<float>, {}}},
          {"reference",
           {[](const Binding& b) {
              require(!is_half(compute_type(b)), b, "f32 or f64 tensors on the reference backend");
              return compute_type(b) == DType::f64 ? bind_rotary<double>(b) : bind_rotary<float>(b);
            },
            {}}}};
}

const AtLoad rotary_registered([] {
  register_kind(
      {.name = "rotary",
       .summary = "x (B, T, K·(P+2)·D), [where documents begin i32 (B, T)] -> query and key heads rotated by position "
                  "in the document; K groups of P queries, key, value",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         check(v);
         require(v.inputs() == 1 || (v.inputs() == 2 && v.has_input(1) && v.input(1).dtype == DType::i32 &&
                                     v.input(1).shape == Shape{v.input(0).shape[0], v.input(0).shape[1]}),
                 v, "x and at most the places where documents begin i32 (B, T)");
         return {like(v.input(0))};
       },
       .gradient =
           [](Differentiation& d) {
             Attributes attributes = d.forward().attributes();
             attributes.set("inverse", int64_t{1} - attributes.integer("inverse"));
             std::vector<TensorId> inputs{d.output_gradient(0)};
             if (d.forward().has_input(1)) inputs.push_back(d.input(1));
             d.set(0, d.build().emit("rotary", inputs, attributes));
           },
       .in_place = {{0, 0}},
       .half = true,
       .sharding = {.dimensions = "bth, bt -> bth", .linear = 1},
       .kernels = kernels()});
  register_kind({.name = "rotary_from",
                 .summary = "x (B, T, K·(P+2)·D), first i32 (B) -> as rotary, of positions first to first + T - 1, "
                            "which are below attribute positions",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   check(v);
                   require(v.inputs() == 2 && v.has_input(1) && v.input(1).dtype == DType::i32 &&
                               v.input(1).shape == Shape{v.input(0).shape[0]} && v.attributes().has("positions") &&
                               v.attributes().integer("positions") > 0,
                           v, "x (B, T, K·(P+2)·D), first i32 (B) and an attribute positions");
                   return {like(v.input(0))};
                 },
                 .in_place = {{0, 0}},
                 .half = true,
                 .kernels = kernels()});
});

}  // namespace
}  // namespace strata::rotary
