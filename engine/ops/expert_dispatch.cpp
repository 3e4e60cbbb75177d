// Tokens on their way to experts and back: where each goes (expert_slots), its copies sorted by expert
// (expert_dispatch), and what comes of them put together (expert_combine). The last two are each other's gradients.
//
// A slot is a row of the sorted copies. With a capacity an expert takes no more rows than that, first choices of all
// tokens before second ones (Lepikhin et al., arXiv 2006.16668); a choice that finds no room has slot -1, is not
// computed and adds nothing. Slots are filled without gaps, so that nothing is computed for rows that nobody has; or,
// as attribute `padded` says, each expert has as many as its capacity, so that it is known where its rows are before it
// is known who has them: other ranks' experts are sent to so.
//
// Padded slots may be filled in several rounds: what finds no room in the slots of the first takes those of the second,
// and so on. The copies of a round (attribute `round`) are as many as those of any other. With attribute `together` so
// many rounds at a time are filled in turn (expert_rounds.h), so that all have as much to compute.
//
// Where ranks divide the tokens of sequences each has slots, and copies, of its own tokens' choices.
#include <algorithm>
#include <cstring>

#include "engine/ops/expert_rounds.h"
#include "engine/ops/rank_order.h"
#include "engine/ops/registration.h"
#include "engine/ops/vector.h"

namespace strata::expert_dispatch {
namespace {

constexpr int64_t kMostChoices = int64_t{1} << 30;  // slots are i32

bool is_integer(const OpView& v, int i) { return v.has_input(i) && v.input(i).dtype == DType::i32; }

bool is_padded(const OpView& v) { return v.attributes().integer("padded", 0) != 0; }
int64_t round_of(const OpView& v) { return v.attributes().integer("round", 0); }
int64_t rounds_of(const OpView& v) { return v.attributes().integer("rounds", 1); }

// Choices that an expert takes.
int64_t room_of(const OpView& v) {
  return v.attributes().integer("limit", v.attributes().integer("capacity") * rounds_of(v));
}

// The row of a choice among the `rows` of a round; -1: it has none there.
int64_t row_in_round(int64_t slot, int64_t round, int64_t rows) {
  const int64_t row = slot - round * rows;
  return slot >= 0 && row >= 0 && row < rows ? row : -1;
}

// Choices of a token that went to each expert and how many found room, then where each expert's rows begin, then slots.
void assign_slots(const Binding& b) {
  const int64_t k = b.columns(0), tokens = b.rows(0), experts = b.attributes().integer("experts"),
                capacity = b.attributes().integer("capacity"), room = room_of(b);
  const ExpertRounds rounds(b, capacity);
  const auto* choices = b.in<int32_t>(0);
  auto *slots = b.out<int32_t>(0), *offsets = b.out<int32_t>(1);
  std::memset(offsets, 0, size_t(experts + 1) * 4);
  for (int64_t j = 0; j < k; ++j)
    for (int64_t t = 0; t < tokens; ++t) {
      const int32_t e = choices[t * k + j];
      const bool fits = e >= 0 && (capacity == 0 || offsets[e + 1] < room);
      slots[t * k + j] = fits ? offsets[e + 1]++ : -1;
    }
  for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
  for (int64_t i = 0; i < tokens * k; ++i) {
    if (slots[i] < 0) continue;
    const int64_t at = slots[i], e = choices[i];
    slots[i] = int32_t(is_padded(b) ? rounds.slot(at, e, experts) : offsets[e] + at);
  }
}

void register_slots() {
  const Kernel kernel{[](const Binding& b) -> Launch { return [b] { assign_slots(b); }; }};
  register_kind(
      {.name = "expert_slots",
       .summary = "choices i32 (…, k) of experts, -1: none -> slots i32 (…, k), -1: dropped, and offsets i32 (E + 1) "
                  "of experts in them; attributes experts = E, capacity (0: any number), padded (1: of each expert as "
                  "many slots as its capacity, in each of `rounds`, of which `together` are filled in turn; offsets "
                  "count those "
                  "that are taken), limit (choices that an expert takes, fewer than it has slots)",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         require(v.inputs() == 1 && is_integer(v, 0) && elements(v.input(0).shape) <= kMostChoices &&
                     v.attributes().has("experts") && v.attributes().integer("experts") > 0 &&
                     v.attributes().has("capacity") && v.attributes().integer("capacity") >= (is_padded(v) ? 1 : 0) &&
                     rounds_of(v) >= 1 && rounds_of(v) % v.attributes().integer("together", 1) == 0 &&
                     (!is_padded(v) || v.attributes().integer("capacity") <=
                                           kMostChoices / v.attributes().integer("experts") / rounds_of(v)),
                 v, "choices i32 (…, k), at most 2^30, and attributes experts and capacity, at most 2^30 slots");
         return {like(v.input(0)), {{v.attributes().integer("experts") + 1}, DType::i32}};
       },
       .sharding = {.dimensions = "btk -> btk, e", .whole = "bk", .by_data = "t", .own = 2},
       .kernels = {{"cpu", kernel}, {"reference", kernel}}});
}

// Choices that find room where each expert takes `capacity` of a microbatch whose tokens ranks divide: those of all
// ranks compete, in the order of the sequence. Inputs: this rank's, and those of all in the order of ranks (without
// them: this rank's are all).
void keep_choices(const Binding& b) {
  const Tensor& own = b.input(0);
  const bool divided = b.has_input(1);
  const RankOrder order(own, 1, divided ? b.attributes().string("axis") : std::string(),
                        divided ? b.attributes().integer("size") : 1);
  const int64_t k = b.columns(0), tokens = order.all(), capacity = b.attributes().integer("capacity");
  const auto* choices = b.in<int32_t>(divided ? 1 : 0);
  auto* const counts = b.workspace<int32_t>();
  std::memset(counts, 0, size_t(b.attributes().integer("experts")) * 4);
  for (int64_t j = 0; j < k; ++j)
    for (int64_t s = 0; s < own.shape[0]; ++s)
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t owner = order.owner(t), local = order.local(t);
        const int32_t e = choices[(s * tokens + owner * order.share + local) * k + j];
        const bool fits = e >= 0 && counts[e] < capacity;
        if (fits) ++counts[e];
        if (owner == order.coordinate) b.out<int32_t>(0)[(s * order.share + local) * k + j] = fits ? e : -1;
      }
}

// As `keep_choices` is given what all ranks have.
std::vector<TensorId> kept_of_all(Builder& build, const OpView& v, const std::string& axis, int size) {
  const TensorId own = v.op().inputs[0];
  Attributes attributes = v.attributes();
  attributes.set("axis", axis);
  attributes.set("size", int64_t(size));
  return {build.emit("expert_kept", {own, gathered_by_rank(build, own, axis, size, 1)}, attributes)};
}

void register_kept() {
  const Kernel kernel{[](const Binding& b) -> Launch { return [b] { keep_choices(b); }; },
                      [](const OpView& v, int) { return v.attributes().integer("experts") * 4; }};
  register_kind(
      {.name = "expert_kept",
       .summary = "choices i32 (B, T, k) of experts, -1: none, [those of all ranks of an axis that divides tokens (B, "
                  "T·size, k)] -> choices, -1 where the expert has `capacity` already, first choices of all tokens "
                  "before second ones; attributes experts, capacity, axis, size",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         const Attributes& a = v.attributes();
         require(v.inputs() >= 1 && is_integer(v, 0) && v.input(0).shape.size() == 3 && a.has("experts") &&
                     a.integer("experts") > 0 && a.has("capacity") && a.integer("capacity") > 0,
                 v, "choices i32 (B, T, k) and attributes experts and capacity");
         if (v.inputs() > 1) {
           Shape all = v.input(0).shape;
           require(a.has("axis") && a.has("size"), v, "attributes axis and size, where there are others' choices");
           all[1] *= a.integer("size");
           require(is_integer(v, 1) && v.input(1).shape == all, v, "choices i32 (B, T·size, k) of all ranks");
         }
         return {like(v.input(0))};
       },
       .sharding = {.dimensions = "btk, bsk -> btk",
                    .whole = "bks",
                    .by_data = "t",
                    .replaced = "t",
                    .replace = kept_of_all},
       .kernels = {{"cpu", kernel}, {"reference", kernel}}});
}

// How many of each expert's slots are taken.
void register_filled() {
  const Kernel kernel{[](const Binding& b) -> Launch {
    return [b] {
      for (int64_t e = 0; e < b.output(0).shape[0]; ++e)
        b.out<int32_t>(0)[e] = b.in<int32_t>(0)[e + 1] - b.in<int32_t>(0)[e];
    };
  }};
  register_kind({.name = "expert_filled",
                 .summary = "offsets i32 (E + 1) -> how many rows each has, i32 (E)",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 1 && is_integer(v, 0) && v.input(0).shape.size() == 1 && v.columns(0) > 1, v,
                           "offsets i32 (E + 1)");
                   return {{{v.columns(0) - 1}, DType::i32}};
                 },
                 .kernels = {{"cpu", kernel}, {"reference", kernel}}});
}

// By which it is known, once it is known of all ranks, how many rounds there are.
void register_most() {
  const Kernel kernel{[](const Binding& b) -> Launch {
    return [b] { *b.out<int32_t>(0) = *std::max_element(b.in<int32_t>(0), b.in<int32_t>(0) + b.columns(0)); };
  }};
  register_kind({.name = "expert_most",
                 .summary = "rows of each expert, i32 (E) -> those of the busiest, i32 (1)",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 1 && is_integer(v, 0) && v.input(0).shape.size() == 1 && v.columns(0) > 0, v,
                           "rows of each expert, i32 (E)");
                   return {{{1}, DType::i32}};
                 },
                 .kernels = {{"cpu", kernel}, {"reference", kernel}}});
}

// Rows that slots can be: no more than choices, and than what experts take.
int64_t rows_of_slots(const OpView& v) {
  const int64_t choices = elements(v.input(1).shape), capacity = v.attributes().integer("capacity");
  const int64_t experts = v.input(2).shape[0] - 1;
  if (is_padded(v)) return experts * capacity;
  return capacity == 0 || capacity > choices / experts ? choices : experts * capacity;
}

bool has_slots(const OpView& v, int i) { return is_integer(v, i) && is_integer(v, i + 1); }
bool weights_fit(const OpView& v) {
  return v.inputs() == 3 || (v.inputs() == 4 && v.has_input(3) && v.input(3).shape == v.input(1).shape &&
                             v.input(3).dtype == v.input(0).dtype);
}

STRATA_SIMD void add_scaled(float* sum, const float* x, float factor, int64_t n) {
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA {
    simd::put(sum + i, simd::get(sum + i, c) + simd::get(x + i, c) * factor, c);
  });
}
STRATA_SIMD float dot(const float* x, const float* y, int64_t n) {
  simd::F sum{};
  simd::map(n, [&](int64_t i, int64_t c) STRATA_INLINE_LAMBDA { sum += simd::get(x + i, c) * simd::get(y + i, c); });
  return simd::sum(sum);
}

constexpr int64_t kChunk = 512;  // of a row of 16-bit numbers as f32

// Chunks of `columns`: body(begin, count).
template <class Body>
void by_chunks(int64_t columns, Body&& body) {
  for (int64_t c = 0; c < columns; c += kChunk) body(c, std::min(kChunk, columns - c));
}
float in_f32(DType type, const void* from, int64_t i) {
  float value;
  to_f32(type, at(from, type, i), &value, 1);
  return value;
}
float number(const Binding& b, int input, int64_t i) { return in_f32(b.input(input).dtype, b.in<void>(input), i); }

// y (S, C): each token's row to its slots, times their weights if there are any.
void dispatch(const Binding& b) {
  const DType type = b.input(0).dtype;
  const int64_t columns = b.columns(0), k = b.columns(1), bytes = columns * size_of(type);
  const int64_t round = round_of(b), rows = b.output(0).shape[0];
  const auto *slots = b.in<int32_t>(1), *offsets = b.in<int32_t>(2);
  const bool weighted = b.has_input(3);
  b.threads().split(b.rows(0), 16, [&](int64_t t, int64_t end) {
    alignas(64) float x[kChunk], y[kChunk];
    for (; t < end; ++t)
      for (int64_t j = 0; j < k; ++j) {
        const int64_t slot = row_in_round(slots[t * k + j], round, rows);
        if (slot < 0) continue;
        if (!weighted) {
          std::memcpy(at(b.out<void>(0), type, slot * columns), at(b.in<void>(0), type, t * columns), size_t(bytes));
          continue;
        }
        const float weight = number(b, 3, t * k + j);
        by_chunks(columns, [&](int64_t c, int64_t n) {
          to_f32(type, at(b.in<void>(0), type, t * columns + c), x, n);
          for (int64_t i = 0; i < n; ++i) y[i] = weight * x[i];
          from_f32(type, y, at(b.out<void>(0), type, slot * columns + c), n);
        });
      }
  });
  const int64_t experts = b.input(2).shape[0] - 1;
  const auto clear = [&](int64_t from, int64_t to) {
    std::memset(at(b.out<void>(0), type, from * columns), 0, size_t((to - from) * bytes));
  };
  if (!is_padded(b)) return clear(offsets[experts], b.output(0).shape[0]);
  const ExpertRounds rounds(b, b.attributes().integer("capacity"));
  for (int64_t e = 0; e < experts; ++e)
    clear(e * rounds.room + rounds.filled(offsets[e + 1] - offsets[e], round), (e + 1) * rounds.room);
}

// y (…, C): the rows of each token's slots, times weights, in the order of its choices.
void combine(const Binding& b) {
  const DType type = b.input(0).dtype;
  const int64_t columns = b.columns(0), k = b.columns(1), round = round_of(b), rows = b.input(0).shape[0];
  const auto* slots = b.in<int32_t>(1);
  b.threads().split(b.rows(1), 16, [&](int64_t t, int64_t end) {
    alignas(64) float x[kChunk], y[kChunk];
    const auto has_row = [&](int32_t slot) { return row_in_round(slot, round, rows) >= 0; };
    for (; t < end; ++t) {
      if (b.accumulates(0) && std::none_of(slots + t * k, slots + (t + 1) * k, has_row)) continue;
      by_chunks(columns, [&](int64_t c, int64_t n) {
        void* const to = at(b.out<void>(0), type, t * columns + c);
        if (b.accumulates(0))
          to_f32(type, to, y, n);
        else
          std::memset(y, 0, sizeof y);
        for (int64_t j = 0; j < k; ++j) {
          const int64_t slot = row_in_round(slots[t * k + j], round, rows);
          if (slot < 0) continue;
          to_f32(type, at(b.in<void>(0), type, slot * columns + c), x, n);
          add_scaled(y, x, b.has_input(3) ? number(b, 3, t * k + j) : 1.0f, n);
        }
        from_f32(type, y, to, n);
      });
    }
  });
}

// dw (…, k): of each choice dy (…, C) times the row of its slot in y (S, C).
void weight_gradient(const Binding& b) {
  const DType type = b.input(0).dtype;
  const int64_t columns = b.columns(0), k = b.columns(2), round = round_of(b), rows = b.input(1).shape[0];
  const auto* slots = b.in<int32_t>(2);
  b.threads().split(b.rows(0), 16, [&](int64_t t, int64_t end) {
    alignas(64) float dy[kChunk], y[kChunk];
    for (; t < end; ++t)
      for (int64_t j = 0; j < k; ++j) {
        const int64_t slot = row_in_round(slots[t * k + j], round, rows);
        if (slot < 0 && b.accumulates(0)) continue;
        float sum = b.accumulates(0) ? in_f32(type, b.out<void>(0), t * k + j) : 0.0f;
        if (slot >= 0)
          by_chunks(columns, [&](int64_t c, int64_t n) {
            to_f32(type, at(b.in<void>(0), type, t * columns + c), dy, n);
            to_f32(type, at(b.in<void>(1), type, slot * columns + c), y, n);
            sum += dot(dy, y, n);
          });
        from_f32(type, &sum, at(b.out<void>(0), type, t * k + j), 1);
      }
  });
}

template <class T>
void plain_dispatch(const Binding& b) {
  const int64_t columns = b.columns(0), rows = b.output(0).shape[0];
  std::fill_n(b.out<T>(0), elements(b.output(0).shape), T(0));
  for (int64_t i = 0; i < elements(b.input(1).shape); ++i)
    if (const int64_t slot = row_in_round(b.in<int32_t>(1)[i], round_of(b), rows); slot >= 0)
      for (int64_t c = 0; c < columns; ++c)
        b.out<T>(0)[slot * columns + c] =
            b.in<T>(0)[i / b.columns(1) * columns + c] * (b.has_input(3) ? b.in<T>(3)[i] : T(1));
}

template <class T>
void plain_combine(const Binding& b) {
  const int64_t columns = b.columns(0), rows = b.input(0).shape[0];
  if (!b.accumulates(0)) std::fill_n(b.out<T>(0), elements(b.output(0).shape), T(0));
  for (int64_t i = 0; i < elements(b.input(1).shape); ++i)
    if (const int64_t slot = row_in_round(b.in<int32_t>(1)[i], round_of(b), rows); slot >= 0)
      for (int64_t c = 0; c < columns; ++c)
        b.out<T>(0)[i / b.columns(1) * columns + c] +=
            b.in<T>(0)[slot * columns + c] * (b.has_input(3) ? b.in<T>(3)[i] : T(1));
}

template <class T>
void plain_weight_gradient(const Binding& b) {
  const int64_t columns = b.columns(0), rows = b.input(1).shape[0];
  for (int64_t i = 0; i < elements(b.input(2).shape); ++i) {
    T sum = b.accumulates(0) ? b.out<T>(0)[i] : T(0);
    if (const int64_t slot = row_in_round(b.in<int32_t>(2)[i], round_of(b), rows); slot >= 0)
      for (int64_t c = 0; c < columns; ++c)
        sum += b.in<T>(0)[i / b.columns(2) * columns + c] * b.in<T>(1)[slot * columns + c];
    b.out<T>(0)[i] = sum;
  }
}

void register_dispatch() {
  register_kind(
      {.name = "expert_dispatch",
       .summary = "x (…, C), slots i32 (…, k), offsets i32 (E + 1), [weights (…, k)] -> y (S, C): row t to its slots; "
                  "attributes capacity, padded, round, together",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         require(v.inputs() >= 3 && v.has_input(0) && is_float(v.input(0)) && has_slots(v, 1) && weights_fit(v) &&
                     v.rows(0) == v.rows(1) && v.attributes().has("capacity"),
                 v, "x (…, C), slots i32 (…, k), offsets i32 (E + 1) and at most weights (…, k) of x's type");
         return {{{rows_of_slots(v), v.columns(0)}, v.input(0).dtype}};
       },
       .gradient =
           [](Differentiation& d) {
             STRATA_CHECK(!d.forward().has_input(3));  // only the gradient of expert_combine has weights
             d.set(0, d.build().emit("expert_combine", {d.output_gradient(0), d.input(1), d.input(2)},
                                     d.forward().attributes()));
           },
       .half = true,
       .sharding = {.dimensions = "...c, ...k, e, ...k -> (...)c", .whole = "cke", .by_data = "."},
       .kernels = {{"cpu", cpu_kernel(dispatch)}, {"reference", reference_kernel([](const Binding& b, auto zero) {
                                                     plain_dispatch<decltype(zero)>(b);
                                                   })}}});
}

void combine_gradients(Differentiation& d) {
  const TensorId dy = d.output_gradient(0);
  if (d.needs(3))
    d.set(3, d.build().emit("expert_combine_weight_gradient", {dy, d.input(0), d.input(1)},
                            {{"round", round_of(d.forward())}}));
  if (!d.needs(0)) return;
  std::vector<TensorId> inputs{dy, d.input(1), d.input(2)};
  if (d.forward().has_input(3)) inputs.push_back(d.input(3));
  d.set(0, d.build().emit("expert_dispatch", inputs, d.forward().attributes()));
}

void register_combine() {
  register_kind(
      {.name = "expert_combine",
       .summary = "y (S, C), slots i32 (…, k), offsets i32 (E + 1), [weights (…, k)] -> x (…, C): sum of a token's "
                  "slots; attributes capacity, padded, round, together",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         require(v.inputs() >= 3 && v.has_input(0) && is_float(v.input(0)) && v.input(0).shape.size() == 2 &&
                     has_slots(v, 1) && weights_fit(v) && v.attributes().has("capacity") &&
                     v.input(0).shape[0] == rows_of_slots(v),
                 v, "y (S, C), slots i32 (…, k), offsets i32 (E + 1) and at most weights (…, k) of y's type");
         Shape shape = v.input(1).shape;
         shape.back() = v.columns(0);
         return {{shape, v.input(0).dtype}};
       },
       .gradient = combine_gradients,
       .accumulates = 1,
       .half = true,
       .sharding = {.dimensions = "(...)c, ...k, e, ...k -> ...c", .whole = "cke", .by_data = "."},
       .kernels = {{"cpu", cpu_kernel(combine)}, {"reference", reference_kernel([](const Binding& b, auto zero) {
                                                    plain_combine<decltype(zero)>(b);
                                                  })}}});
  register_kind(
      {.name = "expert_combine_weight_gradient",
       .summary =
           "dy (…, C), y (S, C), slots i32 (…, k) -> dw (…, k): of each choice dy times the row of its slot; attribute "
           "round",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         require(v.inputs() == 3 && v.has_input(0) && is_float(v.input(0)) && v.has_input(1) &&
                     v.input(1).dtype == v.input(0).dtype && v.input(1).shape.size() == 2 &&
                     v.columns(1) == v.columns(0) && is_integer(v, 2) && v.rows(2) == v.rows(0),
                 v, "dy (…, C), y (S, C) and slots i32 (…, k)");
         return {{v.input(2).shape, v.input(0).dtype}};
       },
       .accumulates = 1,
       .half = true,
       .sharding = {.dimensions = "...c, (...)c, ...k -> ...k", .whole = "ck", .by_data = "."},
       .kernels = {{"cpu", cpu_kernel(weight_gradient)},
                   {"reference",
                    reference_kernel([](const Binding& b, auto zero) { plain_weight_gradient<decltype(zero)>(b); })}}});
}

const AtLoad expert_dispatch_registered([] {
  register_slots();
  register_kept();
  register_filled();
  register_most();
  register_dispatch();
  register_combine();
});

}  // namespace
}  // namespace strata::expert_dispatch
