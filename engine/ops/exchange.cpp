// Exchanges between the ranks of a mesh axis, grouped: any number of tensors of one type in one operation, along any
// dimension (attribute `dimension`, by default the first). They run on a stream of exchanges and nowhere else, and take
// a group from the executor (OpKind::exchange, strata/communicator.h). What a rank's loss depends on through them
// decides the gradients: a sum's gradient is handed back to all that it was made of, and so on.
#include <algorithm>

#include "engine/ops/registration.h"
#include "engine/ops/shares.h"

namespace strata {
namespace {

// Attributes of the exchange that carries gradients back.
Attributes along(const OpView& v) {
  Attributes attributes{{"axis", axis_of(v)}};
  if (dimension_of(v) != 0) attributes.set("dimension", int64_t(dimension_of(v)));
  if (v.attributes().has("size")) attributes.set("size", v.attributes().integer("size"));
  if (v.attributes().has("order")) attributes.set("order", v.attributes().string("order"));
  return attributes;
}

std::vector<TensorSpec> same(const OpView& v) {
  require(v.inputs() == v.outputs() || v.outputs() == 0, v, "as many outputs as inputs");
  std::vector<TensorSpec> specs;
  for (int i = 0; i < v.inputs(); ++i) {
    require(v.has_input(i) && v.input(i).dtype == v.input(0).dtype, v, "tensors of one type");
    specs.push_back(like(v.input(i)));
  }
  return specs;
}
std::vector<Layout> same_layout(const OpView& v) {
  std::vector<Layout> layouts;
  for (int i = 0; i < v.inputs(); ++i) layouts.push_back(v.input(i).layout);
  return layouts;
}

// What is exchanged is the whole tensors, which are the larger of inputs and outputs; `passes` times.
std::function<Cost(const OpView&)> moved(double passes) {
  return [passes](const OpView& v) {
    double in = 0, out = 0;
    for (int i = 0; i < v.inputs(); ++i) in += double(v.input(i).bytes());
    for (int i = 0; i < v.outputs(); ++i) out += double(v.output(i).bytes());
    return Cost{.flops = 0, .bytes = 3 * (in + out), .wire = passes * std::max(in, out)};
  };
}

void check_dimension(const OpView& v, int i) {
  require(v.has_input(i) && v.input(i).dtype == v.input(0).dtype && dimension_of(v) >= 0 &&
              dimension_of(v) < int(v.input(i).shape.size()),
          v, "tensors of one type that have dimension " + std::to_string(dimension_of(v)));
}

// The shares of the whole tensors of an op, one after the other in the workspace where they are packed.
template <class Whole>
std::vector<Shares> shares_of(const Binding& b, int count, Whole&& whole) {
  std::vector<Shares> list;
  std::byte* room = b.workspace<std::byte>();
  for (int i = 0; i < count; ++i) {
    const auto [data, tensor] = whole(i);
    list.emplace_back(data, tensor->shape, dimension_of(b), tensor->dtype, room);
    room += aligned_room(Shares::room_for(tensor->shape, dimension_of(b), tensor->dtype));
  }
  return list;
}
template <class Whole>
int64_t room_of(const OpView& v, int count, Whole&& whole) {
  int64_t bytes = 0;
  for (int i = 0; i < count; ++i)
    bytes += aligned_room(Shares::room_for(whole(i).shape, dimension_of(v), whole(i).dtype));
  return bytes;
}

std::vector<Pieces> pieces_of(const std::vector<Shares>& list, int size) {
  std::vector<Pieces> parts(static_cast<size_t>(size));
  for (int r = 0; r < size; ++r)
    for (const Shares& shares : list) shares.add_to(parts[size_t(r)], r, size);
  return parts;
}

// What ranks hold of pairs of chunks comes together in the order of ranks, which is not that of the whole tensor.
void require_order(const OpView& v, const Split& split) {
  require(split.pair == 0 || (v.attributes().has("order") && v.attributes().string("order") == "ranks"), v,
          "tensors whose parts are contiguous, since it puts them together, but each rank of axis \"" + split.axis +
              "\" has a chunk from the front and one from the back");
}

// With order = "ranks", the last split is one into pairs of chunks.
Layout in_order(const OpView& v, Layout layout) {
  if (v.attributes().has("order")) layout.back().pair = layout.back().full / v.attributes().integer("size") / 2;
  return layout;
}

void add_kind(OpKind kind, const Kernel& kernel) {
  kind.exchange = kind.half = true;
  kind.kernels = {{"cpu", kernel}, {"reference", kernel}};
  register_kind(std::move(kind));
}

// The gradients of outputs that have any, split as the outputs are, through an exchange of another kind.
void hand_back(Differentiation& d, std::string_view kind, Attributes attributes) {
  const OpView& forward = d.forward();
  std::vector<TensorId> gradients;
  std::vector<int> of;
  for (int i = 0; i < forward.outputs(); ++i)
    if (const TensorId gradient = d.output_gradient(i); gradient && d.needs(i)) {
      d.build().program()[gradient].layout = forward.output(i).layout;
      gradients.push_back(gradient), of.push_back(i);
    }
  if (gradients.empty()) return;
  const std::vector<TensorId> back = d.build().emit_all(kind, gradients, std::move(attributes));
  for (size_t i = 0; i < of.size(); ++i) d.set(of[i], back[i]);
}

void register_all_reduce() {
  OpKind kind{.name = "all_reduce",
              .summary = "x (…), … -> the sum or largest over an axis, the same shapes",
              .shape = same,
              .gradient =
                  [](Differentiation& d) {
                    require(d.forward().attributes().string("reduction") == "sum", d.forward(),
                            "the reduction \"sum\": no other has a gradient");
                    for (int i = 0; i < d.forward().outputs(); ++i)
                      if (const TensorId gradient = d.output_gradient(i)) d.set(i, gradient);
                  },
              .cost = moved(2),  // reduced, then gathered
              .layout = same_layout};
  for (int i = 0; i < 256; ++i) kind.in_place.push_back({i, i});
  add_kind(std::move(kind), {[](const Binding& b) -> Launch {
             const Reduction reduction = b.attributes().string("reduction") == "max" ? Reduction::max : Reduction::sum;
             Pieces data;
             std::vector<std::pair<const std::byte*, Piece>> copies;
             for (int i = 0; i < b.outputs(); ++i) {
               const Piece out{b.out<std::byte>(i), b.output(i).bytes()};
               data.add(out);
               if (b.in<std::byte>(i) != out.data) copies.push_back({b.in<std::byte>(i), out});
             }
             return [data, copies, reduction, &group = b.group(), dtype = b.input(0).dtype] {
               for (const auto& [from, to] : copies) group.copy_bytes(to.data, from, to.bytes);
               group.all_reduce(data, dtype, reduction);
             };
           }});
}

void register_reduce_scatter() {
  const auto whole = [](const OpView& v) { return [&v](int i) -> const Tensor& { return v.input(i); }; };
  OpKind kind{.name = "reduce_scatter",
              .summary = "x (…), … -> sums over an axis of `size` ranks, this rank's share along `dimension`"};
  // The shape is the first rank's, which holds the most, or that of the rank whose share a result's layout names.
  kind.shape = [](const OpView& v) {
    std::vector<TensorSpec> specs;
    const int size = int(v.attributes().integer("size")), dimension = dimension_of(v);
    for (int i = 0; i < v.inputs(); ++i) {
      check_dimension(v, i);
      Shape shape = v.input(i).shape;
      require(shape[size_t(dimension)] > 0, v, "tensors with something to share along the dimension");
      shape[size_t(dimension)] = share_of_output(v, i, dimension, axis_of(v), shape[size_t(dimension)], size);
      specs.push_back({shape, v.input(i).dtype});
    }
    return specs;
  };
  kind.layout = [](const OpView& v) {
    std::vector<Layout> layouts;
    for (int i = 0; i < v.inputs(); ++i)
      layouts.push_back(in_order(
          v, with_split(v.input(i).layout, dimension_of(v), axis_of(v), v.input(i).shape[size_t(dimension_of(v))])));
    return layouts;
  };
  kind.gradient = [](Differentiation& d) { hand_back(d, "all_gather", along(d.forward())); };
  kind.cost = moved(1);
  add_kind(std::move(kind), {[](const Binding& b) -> Launch {
                               const int size = b.group().size();
                               const std::vector<Shares> shares = shares_of(b, b.inputs(), [&](int i) {
                                 return std::pair(const_cast<std::byte*>(b.in<std::byte>(i)), &b.input(i));
                               });
                               Pieces result;
                               for (int i = 0; i < b.outputs(); ++i)
                                 result.add({b.out<std::byte>(i), b.output(i).bytes()});
                               return [shares, parts = pieces_of(shares, size), result, &group = b.group(),
                                       dtype = b.input(0).dtype] {
                                 for (const Shares& one : shares)
                                   for (int r = 0; r < group.size(); ++r) one.pack(group, r, group.size());
                                 group.reduce_scatter(parts, result, dtype);
                               };
                             },
                             [whole](const OpView& v, int) { return room_of(v, v.inputs(), whole(v)); }});
}

void register_all_gather() {
  const auto whole = [](const OpView& v) { return [&v](int i) -> const Tensor& { return v.output(i); }; };
  OpKind kind{.name = "all_gather",
              .summary =
                  "x (a share along `dimension`), … -> the whole tensors. Its gradient is a sum over the axis, or "
                  "with the attribute gradient = \"whole\", where all ranks use the result alike, a slice"};
  kind.shape = [](const OpView& v) {
    std::vector<TensorSpec> specs;
    for (int i = 0; i < v.inputs(); ++i) {
      check_dimension(v, i);
      const Split* split = last_split(v.input(i), dimension_of(v), axis_of(v));
      require(split, v, "tensors that are split along the dimension over the axis, last of its splits");
      require_order(v, *split);
      Shape shape = v.input(i).shape;
      shape[size_t(dimension_of(v))] = split->full;
      specs.push_back({shape, v.input(i).dtype});
    }
    return specs;
  };
  kind.layout = [](const OpView& v) {
    std::vector<Layout> layouts;
    for (int i = 0; i < v.inputs(); ++i) layouts.push_back(without_split(v.input(i), dimension_of(v), axis_of(v)));
    return layouts;
  };
  kind.gradient = [](Differentiation& d) {
    const OpView& v = d.forward();
    require(v.attributes().has("size"), v, "an attribute size, the ranks of the axis, where it has a gradient");
    const bool alike = v.attributes().has("gradient") && v.attributes().string("gradient") == "whole";
    hand_back(d, alike ? "local_slice" : "reduce_scatter", along(v));
  };
  kind.cost = moved(1);
  add_kind(std::move(kind), {[](const Binding& b) -> Launch {
                               const int size = b.group().size();
                               const std::vector<Shares> shares = shares_of(
                                   b, b.outputs(), [&](int i) { return std::pair(b.out<std::byte>(i), &b.output(i)); });
                               std::vector<const std::byte*> own;
                               for (int i = 0; i < b.inputs(); ++i) own.push_back(b.in<std::byte>(i));
                               return [shares, own, parts = pieces_of(shares, size), &group = b.group()] {
                                 for (size_t i = 0; i < own.size(); ++i)
                                   shares[i].put(group, group.rank(), group.size(), own[i]);
                                 group.all_gather(parts);
                                 for (const Shares& one : shares)
                                   for (int r = 0; r < group.size(); ++r) one.unpack(group, r, group.size());
                               };
                             },
                             [whole](const OpView& v, int) { return room_of(v, v.outputs(), whole(v)); }});
}

void register_gather_rows() {
  OpKind kind{.name = "gather_rows",
              .summary = "x (rows, …) of which this rank's share is right, … -> all rows, in place",
              .shape = same,
              .cost = moved(1),
              .layout = same_layout};
  add_kind(std::move(kind), {[](const Binding& b) -> Launch {
             std::vector<Shares> shares;
             for (int i = 0; i < b.outputs(); ++i)
               shares.emplace_back(b.out<std::byte>(i), b.output(i).shape, 0, b.output(i).dtype, nullptr);
             return [parts = pieces_of(shares, b.group().size()), &group = b.group()] { group.all_gather(parts); };
           }});
}

// Shares of dimension `gather` become whole, and dimension `split` is shared instead.
Attributes turned(const OpView& v) {
  return {{"axis", axis_of(v)},
          {"size", v.attributes().integer("size")},
          {"gather", v.attributes().integer("split")},
          {"split", v.attributes().integer("gather")}};
}

void register_all_to_all() {
  OpKind kind{.name = "all_to_all",
              .summary =
                  "x (a share along dimension `gather`), … -> that dimension whole, a share along dimension "
                  "`split` among `size` ranks"};
  kind.shape = [](const OpView& v) {
    std::vector<TensorSpec> specs;
    const int gather = dimension_of(v, "gather"), split = dimension_of(v, "split");
    const int size = int(v.attributes().integer("size"));
    for (int i = 0; i < v.inputs(); ++i) {
      require(v.has_input(i) && v.input(i).dtype == v.input(0).dtype, v, "tensors of one type");
      Shape shape = v.input(i).shape;
      const int dimensions = int(shape.size());
      require(gather >= 0 && split >= 0 && gather < dimensions && split < dimensions && gather != split, v,
              "two dimensions of the tensors, `gather` and `split`");
      const Split* held = last_split(v.input(i), gather, axis_of(v));
      require(held, v, "tensors whose dimension `gather` is split over the axis, last of its splits");
      require_order(v, *held);
      require(shape[size_t(split)] >= size, v, "at least one of dimension `split` a rank");
      shape[size_t(gather)] = held->full;
      shape[size_t(split)] = share_of_output(v, i, split, axis_of(v), shape[size_t(split)], size);
      specs.push_back({shape, v.input(i).dtype});
    }
    return specs;
  };
  kind.layout = [](const OpView& v) {
    std::vector<Layout> layouts;
    const int split = dimension_of(v, "split");
    for (int i = 0; i < v.inputs(); ++i)
      layouts.push_back(with_split(without_split(v.input(i), dimension_of(v, "gather"), axis_of(v)), split, axis_of(v),
                                   v.input(i).shape[size_t(split)]));
    return layouts;
  };
  kind.gradient = [](Differentiation& d) { hand_back(d, "all_to_all", turned(d.forward())); };
  kind.cost = [](const OpView& v) {
    Cost cost;
    for (int i = 0; i < v.inputs(); ++i) {
      cost.bytes += 3 * double(v.input(i).bytes() + v.output(i).bytes());
      cost.wire += double(v.input(i).bytes());
    }
    return cost;
  };
  // A message is a block of the tensor, row by row: one piece of memory on both sides, packed where it is not.
  const auto room = [](const OpView& v, int i, bool out) {
    const Tensor& tensor = out ? v.output(i) : v.input(i);
    return aligned_room(
        Shares::room_for(tensor.shape, dimension_of(v, out ? "gather" : "split"), tensor.dtype, Shares::in_one_piece));
  };
  add_kind(std::move(kind),
           {[room](const Binding& b) -> Launch {
              const int size = b.group().size();
              std::vector<Shares> from, to;
              std::byte* at = b.workspace<std::byte>();
              for (int i = 0; i < b.inputs(); ++i) {
                from.emplace_back(const_cast<std::byte*>(b.in<std::byte>(i)), b.input(i).shape,
                                  dimension_of(b, "split"), b.input(i).dtype, at, Shares::in_one_piece);
                at += room(b, i, false);
                to.emplace_back(b.out<std::byte>(i), b.output(i).shape, dimension_of(b, "gather"), b.output(i).dtype,
                                at, Shares::in_one_piece);
                at += room(b, i, true);
              }
              return [from, to, send = pieces_of(from, size), receive = pieces_of(to, size), &group = b.group()] {
                for (const Shares& one : from)
                  for (int r = 0; r < group.size(); ++r) one.pack(group, r, group.size());
                group.all_to_all(send, receive);
                for (const Shares& one : to)
                  for (int r = 0; r < group.size(); ++r) one.unpack(group, r, group.size());
              };
            },
            [room](const OpView& v, int) {
              int64_t bytes = 0;
              for (int i = 0; i < v.inputs(); ++i) bytes += room(v, i, false) + room(v, i, true);
              return bytes;
            }});
}

// Not send and receive, which are between two ranks: all ranks of the axis come together, as many bytes on the wire.
void register_shift() {
  OpKind kind{.name = "shift",
              .summary =
                  "x (…), any number -> what the rank `offset` before on an axis of `size` ranks has, around its end; "
                  "split as x is said to be, though it is the part of another rank"};
  kind.shape = [](const OpView& v) {
    require(v.inputs() >= 1 && v.attributes().has("offset") && v.attributes().has("size") &&
                v.attributes().integer("offset") % v.attributes().integer("size") != 0,
            v, "tensors, and attributes size and offset, which is not around to the same rank");
    return same(v);
  };
  kind.gradient = [](Differentiation& d) {
    Attributes back = d.forward().attributes();
    back.set("offset", -back.integer("offset"));
    hand_back(d, "shift", back);
  };
  kind.cost = [](const OpView& v) {
    // Handed on whole: what is counted here is multiplied by (n - 1) / n.
    const double size = double(v.attributes().integer("size"));
    double bytes = 0;
    for (int i = 0; i < v.inputs(); ++i) bytes += double(v.input(i).bytes());
    return Cost{.flops = 0, .bytes = 3 * 2 * bytes, .wire = bytes * size / (size - 1)};
  };
  kind.layout = same_layout;
  add_kind(std::move(kind), {[](const Binding& b) -> Launch {
             const int64_t size = b.group().size(), offset = b.attributes().integer("offset") % size + size;
             std::vector<Pieces> send(static_cast<size_t>(size)), receive(static_cast<size_t>(size));
             for (int i = 0; i < b.inputs(); ++i) {
               send[size_t((b.group().rank() + offset) % size)].add(
                   {const_cast<std::byte*>(b.in<std::byte>(i)), b.input(i).bytes()});
               receive[size_t((b.group().rank() + 2 * size - offset) % size)].add(
                   {b.out<std::byte>(i), b.output(i).bytes()});
             }
             return [send, receive, &group = b.group()] { group.all_to_all(send, receive); };
           }});
}

const AtLoad exchange_registered([] {
  register_shift();
  register_all_reduce();
  register_reduce_scatter();
  register_all_gather();
  register_gather_rows();
  register_all_to_all();
});

}  // namespace
}  // namespace strata
