// Where a tensor that is whole on every rank of an axis meets split ones: what each rank takes of it, without a wire.
// local_slice takes a share along a dimension; replicated takes all of it, and says that each rank's gradient is only
// what this rank adds to it. Their gradients are exchanges (exchange.cpp). counted_once takes all of it on one rank and
// zeros on the others, so that a sum over the axis has it once; its gradient is the sum's, on every rank.
// What all_gather put together in the order of ranks (order = "ranks") is taken apart in that order.
#include <cstring>

#include "engine/ops/registration.h"
#include "engine/ops/shares.h"

namespace strata {
namespace {

bool in_rank_order(const OpView& v) { return v.attributes().has("order"); }

// Rows of an output in its input: the slice is `outer` pieces of memory.
struct Slice {
  int64_t outer, step, offset, bytes;
};

Slice slice_of(const OpView& v) {
  const int dimension = dimension_of(v);
  const Shape &whole = v.input(0).shape, &own = v.output(0).shape;
  Slice slice{.outer = 1, .step = size_of(v.input(0).dtype), .offset = 0, .bytes = 0};
  for (int d = 0; d < dimension; ++d) slice.outer *= whole[size_t(d)];
  for (size_t d = size_t(dimension) + 1; d < whole.size(); ++d) slice.step *= whole[d];
  const Split* split = last_split(v.output(0), dimension, axis_of(v));
  if (split) slice.offset = (split->pair > 0 ? 2 * split->first : split->first) * slice.step;
  slice.bytes = own[size_t(dimension)] * slice.step;
  slice.step *= whole[size_t(dimension)];
  return slice;
}

Launch bind_slice(const Binding& b) {
  return [slice = slice_of(b), from = b.in<std::byte>(0), to = b.out<std::byte>(0), &threads = b.threads()] {
    if (slice.bytes == 0) return;
    const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 16) / slice.bytes);
    threads.split(slice.outer, grain, [&](int64_t begin, int64_t end) {
      for (int64_t o = begin; o < end; ++o)
        std::memcpy(to + o * slice.bytes, from + o * slice.step + slice.offset, size_t(slice.bytes));
    });
  };
}

Launch bind_copy(const Binding& b) {
  return [from = b.in<std::byte>(0), to = b.out<std::byte>(0), bytes = b.input(0).bytes(), &threads = b.threads()] {
    if (to == from) return;
    threads.split(bytes, 1 << 16,
                  [&](int64_t begin, int64_t end) { std::memcpy(to + begin, from + begin, size_t(end - begin)); });
  };
}

TensorId split_as_output(Differentiation& d) {
  const TensorId gradient = d.output_gradient(0);
  d.build().program()[gradient].layout = d.forward().output(0).layout;
  return gradient;
}

void register_slice() {
  OpKind kind{.name = "local_slice",
              .summary = "x (…), the same on all ranks of an axis of `size` -> this rank's share along `dimension`; "
                         "attribute order = \"ranks\": of pairs of chunks that stand in the order of ranks"};
  kind.shape = [](const OpView& v) -> std::vector<TensorSpec> {
    const int dimension = dimension_of(v), size = int(v.attributes().integer("size"));
    require(v.inputs() == 1 && v.has_input(0) && dimension >= 0 && dimension < int(v.input(0).shape.size()) &&
                v.input(0).shape[size_t(dimension)] >= size,
            v, "one tensor with at least one of the dimension a rank");
    Shape shape = v.input(0).shape;
    shape[size_t(dimension)] = share_of_output(v, 0, dimension, axis_of(v), shape[size_t(dimension)], size);
    return {{shape, v.input(0).dtype}};
  };
  kind.layout = [](const OpView& v) -> std::vector<Layout> {
    const int64_t full = v.input(0).shape[size_t(dimension_of(v))];
    Layout layout = with_split(v.input(0).layout, dimension_of(v), axis_of(v), full);
    if (in_rank_order(v)) layout.back().pair = full / v.attributes().integer("size") / 2;
    return {layout};
  };
  kind.gradient = [](Differentiation& d) {
    const OpView& v = d.forward();
    Attributes attributes{{"axis", axis_of(v)},
                          {"dimension", int64_t(dimension_of(v))},
                          {"size", v.attributes().integer("size")},
                          {"gradient", std::string("whole")}};
    if (in_rank_order(v)) attributes.set("order", std::string("ranks"));
    const TensorId gradient = split_as_output(d);
    d.set(0, d.build().emit("all_gather", {gradient}, attributes));
  };
  kind.half = true;
  kind.kernels = {{"cpu", {bind_slice}}, {"reference", {bind_slice}}};
  register_kind(std::move(kind));
}

void register_replicated() {
  OpKind kind{.name = "replicated",
              .summary = "x (…), the same on all ranks of an axis -> x, whose gradient is summed over the axis"};
  kind.shape = [](const OpView& v) -> std::vector<TensorSpec> {
    require(v.inputs() == 1 && v.has_input(0) && v.attributes().has("axis"), v, "one tensor and an attribute axis");
    return {like(v.input(0))};
  };
  kind.layout = [](const OpView& v) -> std::vector<Layout> { return {v.input(0).layout}; };
  kind.gradient = [](Differentiation& d) {
    const Attributes attributes{{"axis", axis_of(d.forward())}, {"reduction", std::string("sum")}};
    const TensorId gradient = split_as_output(d);
    d.set(0, d.build().emit("all_reduce", {gradient}, attributes));
  };
  kind.in_place = {{0, 0}};
  kind.half = true;
  kind.kernels = {{"cpu", {bind_copy}}, {"reference", {bind_copy}}};
  register_kind(std::move(kind));
}

Launch bind_once(const Binding& b) {
  const bool first = b.attributes().integer("coordinate") == 0;
  return [first, from = b.in<std::byte>(0), to = b.out<std::byte>(0), bytes = b.input(0).bytes()] {
    if (!first)
      std::memset(to, 0, size_t(bytes));
    else if (to != from)
      std::memcpy(to, from, size_t(bytes));
  };
}

void register_once() {
  OpKind kind{.name = "counted_once",
              .summary = "x (…), the same on all ranks of an axis -> x on the rank of `coordinate` 0, zeros on others"};
  kind.shape = [](const OpView& v) -> std::vector<TensorSpec> {
    require(v.inputs() == 1 && v.has_input(0) && v.attributes().has("axis") && v.attributes().has("coordinate"), v,
            "one tensor and attributes axis and coordinate");
    return {like(v.input(0))};
  };
  kind.layout = [](const OpView& v) -> std::vector<Layout> { return {v.input(0).layout}; };
  kind.gradient = [](Differentiation& d) { d.set(0, d.output_gradient(0)); };
  kind.in_place = {{0, 0}};
  kind.half = true;
  kind.kernels = {{"cpu", {bind_once}}, {"reference", {bind_once}}};
  register_kind(std::move(kind));
}

const AtLoad local_slice_registered([] {
  register_slice();
  register_replicated();
  register_once();
});

}  // namespace
}  // namespace strata
