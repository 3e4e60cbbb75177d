// Early placement of ops; see hoist.h.
#include "engine/planning/hoist.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "strata/op_kind.h"

namespace strata {
namespace {

// The ops in this order, but what needs the result of an exchange comes after the next exchange has begun: the one
// before has until then to hide behind compute. Costs memory for one more bucket.
std::vector<Op> behind_exchanges(Program& program, const std::vector<int32_t>& order,
                                 const std::vector<char>& movable) {
  std::vector<Op> ops, held;
  std::set<int32_t> arriving, read, written;  // outputs of the last exchange; what held ops touch
  const auto whole = [&](TensorId id) { return program.whole(id).value; };
  const auto touches = [&](const Op& op, const std::set<int32_t>& reads, const std::set<int32_t>& writes) {
    return std::any_of(op.inputs.begin(), op.inputs.end(),
                       [&](TensorId id) { return id && writes.contains(whole(id)); }) ||
           std::any_of(op.outputs.begin(), op.outputs.end(),
                       [&](TensorId id) { return reads.contains(whole(id)) || writes.contains(whole(id)); });
  };
  const auto release = [&] {
    std::move(held.begin(), held.end(), std::back_inserter(ops));
    held.clear();
    read.clear();
    written.clear();
  };
  for (int32_t i : order) {
    Op& op = program.ops[size_t(i)];
    const bool exchange = op.stream == Stream::exchange, after_held = touches(op, read, written);
    // What ranks send each other, or exchange over other axes, stays in the order in which all have it.
    const bool passes = is_exchange(op.stream);
    if (!exchange && !passes && movable[size_t(i)] && (after_held || touches(op, {}, arriving))) {
      for (TensorId id : op.inputs)
        if (id) read.insert(whole(id));
      for (TensorId id : op.outputs) written.insert(whole(id));
      held.push_back(std::move(op));
      continue;
    }
    if (after_held) release();
    if (exchange) arriving.clear();
    for (TensorId id : op.outputs)
      if (exchange) arriving.insert(whole(id));
    ops.push_back(std::move(op));
    if (exchange) release();
  }
  release();
  return ops;
}

}  // namespace

void hoist(Program& program, size_t first) {
  std::vector<char> movable(program.ops.size(), false);
  std::fill(movable.begin() + int64_t(std::min(first, movable.size())), movable.end(), true);
  hoist(program, movable);
}

namespace {

// The axis over which an op exchanges; empty for others.
std::string axis_of(const Op& op) {
  return op.kind->exchange && op.attributes.has("axis") ? op.attributes.string("axis") : "";
}

// For each op the last op before it that touches its tensors in a conflicting way, which it may follow at once; itself
// where it is not to move.
std::vector<int32_t> places(const Program& program, const std::vector<char>& movable) {
  const auto count = program.tensors.size();
  std::vector<int32_t> last_write(count, -1), last_access(count, -1), ready(program.ops.size());
  // What comes from another rank ahead of its turn: for ops that move, it is there with the first op that waits for it.
  std::vector<char> received(count, false);
  std::map<std::string, int32_t> last_pass;      // by axis: where the last op that sends or receives over it is
  std::map<std::string, int32_t> last_together;  // of these axes, where the last op is by which all ranks exchange
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    // What all ranks of an axis exchange together comes after all that they hand to each other along it: another may
    // wait for that before it comes, and what is held up behind the exchange may be what is to be handed on. So does
    // what they send each other of gradients that they share, in the same order on all. And what they exchange together
    // has one order, though on each it may be ready at another time.
    const std::string axis = axis_of(op);
    const bool passes = op.stream == Stream::send || op.stream == Stream::receive;
    const auto found = last_pass.find(axis);
    int32_t after = found != last_pass.end() && (movable[i] || !passes) ? found->second : -1;
    const bool together = found != last_pass.end() && !passes && !axis.empty();
    if (const auto other = last_together.find(axis); together && other != last_together.end())
      after = std::max(after, other->second);
    const auto whole = [&](TensorId id) { return size_t(program.whole(id).value); };
    for (TensorId id : op.inputs)
      if (id) after = std::max(after, last_write[whole(id)]);
    for (TensorId id : op.outputs) after = std::max(after, last_access[whole(id)]);
    ready[i] = movable[i] ? after : int32_t(i);
    if (together) last_together[axis] = ready[i];
    if (passes) last_pass[axis] = found == last_pass.end() ? ready[i] : std::max(found->second, ready[i]);
    for (TensorId id : op.inputs)
      if (id) last_access[whole(id)] = std::max(last_access[whole(id)], ready[i]);
    for (TensorId id : op.inputs)
      if (id && !movable[i] && std::exchange(received[whole(id)], false)) last_write[whole(id)] = int32_t(i);
    for (TensorId id : op.outputs) {
      last_write[whole(id)] = last_access[whole(id)] = std::max(last_access[whole(id)], ready[i]);
      received[whole(id)] = op.stream == Stream::receive;
    }
  }
  return ready;
}

// The ops by their places, those of one place as they were. Those that stay are in order as it is, so only the movable
// are sorted.
std::vector<int32_t> order_by(const std::vector<int32_t>& ready, const std::vector<char>& movable) {
  std::vector<int32_t> stay, move, order;
  for (size_t i = 0; i < ready.size(); ++i) (movable[i] ? move : stay).push_back(int32_t(i));
  std::stable_sort(move.begin(), move.end(), [&](int32_t a, int32_t b) { return ready[size_t(a)] < ready[size_t(b)]; });
  order.reserve(ready.size());
  std::merge(stay.begin(), stay.end(), move.begin(), move.end(), std::back_inserter(order),
             [&](int32_t a, int32_t b) { return std::pair(ready[size_t(a)], a) < std::pair(ready[size_t(b)], b); });
  return order;
}

// ops[i] becomes what ops[order[i]] was, without a second list.
void permute(std::vector<Op>& ops, std::vector<int32_t>& order) {
  for (size_t first = 0; first < order.size(); ++first) {
    if (order[first] == int32_t(first)) continue;
    Op held = std::move(ops[first]);
    size_t at = first;
    for (;;) {
      const size_t from = size_t(std::exchange(order[at], int32_t(at)));
      if (from == first) break;
      ops[at] = std::move(ops[from]);
      at = from;
    }
    ops[at] = std::move(held);
  }
}

}  // namespace

void hoist(Program& program, const std::vector<char>& movable) {
  if (std::none_of(movable.begin(), movable.end(), [](char may) { return may; })) return;
  std::vector<int32_t> order = order_by(places(program, movable), movable);
  const auto exchanges = [](const Op& op) { return op.stream == Stream::exchange; };
  if (std::any_of(program.ops.begin(), program.ops.end(), exchanges))
    program.ops = behind_exchanges(program, order, movable);
  else
    permute(program.ops, order);
}

}  // namespace strata
