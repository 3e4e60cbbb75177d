// Early placement of ops; see hoist.h.
#include "engine/planning/hoist.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <set>

namespace strata {
namespace {

// The ops in this order, but what needs the result of an exchange comes after the next exchange has begun: the one
// before has until then to hide behind compute. Costs memory for one more bucket.
std::vector<Op> behind_exchanges(Program& program, const std::vector<size_t>& order, const std::vector<char>& movable) {
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
  for (size_t i : order) {
    Op& op = program.ops[i];
    const bool exchange = op.stream == Stream::exchange, after_held = touches(op, read, written);
    if (!exchange && movable[i] && (after_held || touches(op, {}, arriving))) {
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

void hoist(Program& program, const std::vector<char>& movable) {
  // Position after which each op may run: the last op before it that touches its tensors in a conflicting way.
  const auto count = program.tensors.size();
  std::vector<int64_t> last_write(count, -1), last_access(count, -1), ready(program.ops.size());
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    int64_t after = -1;
    const auto whole = [&](TensorId id) { return size_t(program.whole(id).value); };
    for (TensorId id : op.inputs)
      if (id) after = std::max(after, last_write[whole(id)]);
    for (TensorId id : op.outputs) after = std::max(after, last_access[whole(id)]);
    ready[i] = movable[i] ? after : int64_t(i);
    for (TensorId id : op.inputs)
      if (id) last_access[whole(id)] = std::max(last_access[whole(id)], ready[i]);
    for (TensorId id : op.outputs)
      last_write[whole(id)] = last_access[whole(id)] = std::max(last_access[whole(id)], ready[i]);
  }
  std::vector<size_t> order(program.ops.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ready[a] < ready[b]; });
  program.ops = behind_exchanges(program, order, movable);
}

}  // namespace strata
