// Rows on their way to the ranks that have their experts, and back. Each rank has rows for all experts, as many for
// each, and gives every rank those of its experts; what a rank receives are the rows of its experts from each of them.
// Both ways the bytes of a rank's part lie in one piece.
//
// Rows of a further round (attribute `round`) cross only where some expert has more than all rounds before take: with
// attribute `capacity`, what it takes of a rank in one, and the most that any has of one rank, alike on all ranks, as
// the second input; rounds that are filled together, as attribute `together` says, cross together. Otherwise nothing
// comes, and nobody reads what should have: there it is nobody's rows.
//
// With attribute `behind` it is to hide behind other work, which must not wait for the memory of what crosses
// (memory_plan.cpp).
//
// Where an axis divides tokens (a split of S), ranks with the same part of the tokens exchange with each other.
#include <algorithm>

#include "engine/ops/expert_rounds.h"
#include "engine/ops/registration.h"
#include "engine/ops/shares.h"
#include "strata/communicator.h"

namespace strata::expert_exchange {
namespace {

bool to_experts(const OpView& v) { return v.attributes().string("to") == "experts"; }
int64_t size_of_axis(const OpView& v) { return v.attributes().integer("size"); }

bool has_split(const Tensor& tensor, int dimension, const std::string& axis) {
  return std::any_of(tensor.layout.begin(), tensor.layout.end(), [&](const Split& split) {
    return split.dimension == dimension && (axis.empty() || split.axis == axis);
  });
}

std::vector<TensorSpec> shape(const OpView& v) {
  require(v.has_input(0) && v.attributes().has("to") && v.attributes().has("size"), v,
          "a tensor, and attributes to and size");
  require(v.inputs() == 1 ||
              (v.inputs() == 2 && v.has_input(1) && v.input(1).dtype == DType::i32 && v.input(1).shape == Shape{1} &&
               v.attributes().has("round") && v.attributes().has("capacity")),
          v, "at most an i32 (1) beside the tensor, and then attributes round and capacity");
  const Tensor& x = v.input(0);
  Shape shape = x.shape;
  if (to_experts(v)) {
    require(shape[0] % size_of_axis(v) == 0 && !has_split(x, 0, axis_of(v)), v,
            "rows for the experts of each of " + std::to_string(size_of_axis(v)) + " ranks, x (S, …)");
    shape[0] /= size_of_axis(v);
    shape.insert(shape.begin(), size_of_axis(v));
  } else {
    require(shape.size() >= 2 && shape[0] == size_of_axis(v) && has_split(x, 1, axis_of(v)), v,
            "rows from each rank for this one's experts, x (N, S / N, …), split over the axis");
    shape[1] *= shape[0];
    shape.erase(shape.begin());
  }
  return {{shape, x.dtype}};
}

std::vector<Layout> layout(const OpView& v) {
  Layout layout;
  for (Split split : v.input(0).layout) {
    if (!to_experts(v) && split.dimension == 1 && split.axis == axis_of(v)) continue;
    if (split.dimension == 0) {  // other ranks' tokens: rows from as many more ranks
      const int64_t ranks = split.full / v.input(0).shape[0];
      split.full = ranks * (to_experts(v) ? size_of_axis(v) : v.input(0).shape[0] * v.input(0).shape[1]);
      split.pair = 0;
    } else {
      split.dimension += to_experts(v) ? 1 : -1;
    }
    layout.push_back(split);
  }
  if (to_experts(v)) layout.push_back({.dimension = 1, .axis = axis_of(v), .full = v.input(0).shape[0]});
  return {layout};
}

Launch bind(const Binding& b) {
  const int size = b.group().size();
  std::vector<Pieces> send(static_cast<size_t>(size)), receive(static_cast<size_t>(size));
  const int64_t bytes = b.input(0).bytes() / size;
  for (int r = 0; r < size; ++r) {
    send[size_t(r)].add({const_cast<std::byte*>(b.in<std::byte>(0)) + r * bytes, bytes});
    receive[size_t(r)].add({b.out<std::byte>(0) + r * bytes, bytes});
  }
  // Who puts exchanges into a queue does not know the number yet: there all rounds cross.
  const auto* most = b.inputs() > 1 && !b.group().asynchronous() ? b.in<int32_t>(1) : nullptr;
  const int64_t before =
      most ? ExpertRounds(b, b.attributes().integer("capacity")).before(b.attributes().integer("round")) : 0;
  return [send, receive, most, before, &group = b.group()] {
    int32_t rows = 0;
    if (most) group.copy_bytes(&rows, most, sizeof rows);
    if (!most || rows > before) group.all_to_all(send, receive);
  };
}

const AtLoad expert_exchange_registered([] {
  OpKind kind{.name = "expert_exchange",
              .summary =
                  "to = \"experts\": x (S, …), rows for the experts of each of `size` ranks of an axis -> (N, S / N, "
                  "…), those for this one's, from each rank; to = \"tokens\": the way back; of further rounds: also "
                  "most i32 (1), attributes round, capacity, together; behind: other work "
                  "goes on meanwhile"};
  kind.shape = shape;
  kind.gradient = [](Differentiation& d) {
    const OpView& v = d.forward();
    const TensorId gradient = d.output_gradient(0);
    d.build().program()[gradient].layout = v.output(0).layout;
    Attributes back = v.attributes();
    back.set("to", std::string(to_experts(v) ? "tokens" : "experts"));
    std::vector<TensorId> inputs{gradient};
    if (v.inputs() > 1) inputs.push_back(d.input(1));
    d.set(0, d.build().emit("expert_exchange", inputs, back));
  };
  kind.cost = [](const OpView& v) {
    const double bytes = v.inputs() > 1 ? 0.0 : double(v.input(0).bytes());  // further rounds are the exception
    return Cost{.flops = 0, .bytes = 3 * 2 * bytes, .wire = bytes};
  };
  kind.layout = layout;
  kind.exchange = kind.half = true;
  kind.kernels = {{"cpu", {bind}}, {"reference", {bind}}};
  register_kind(std::move(kind));
});

}  // namespace
}  // namespace strata::expert_exchange
