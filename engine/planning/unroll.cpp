// Gradient accumulation by unrolling, and early placement of updates; see unroll.h.
#include "engine/planning/unroll.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <set>

namespace strata {
namespace {

void check_order(const ScheduleStage& schedule, bool has_backward) {
  std::vector<int> seen(schedule.microbatches, 0);
  bool right = true;
  for (const Pass& pass : schedule.order) {
    if (pass.microbatch < 0 || pass.microbatch >= schedule.microbatches)
      right = false;
    else if (pass.stage == Stage::forward)
      right &= seen[pass.microbatch]++ == 0;
    else if (pass.stage == Stage::backward)
      right &= seen[pass.microbatch]++ == 1;
    else
      right = false;
    if (!right) break;
  }
  right &= std::all_of(seen.begin(), seen.end(), [&](int count) { return count == (has_backward ? 2 : 1); });
  if (!right)
    throw Error("the schedule must run the forward pass and then the backward pass of each of the " +
                std::to_string(schedule.microbatches) + " microbatches once.");
}

class Unroller {
 public:
  Unroller(const Program& single, const std::vector<TensorId>& parameters, std::vector<TensorId>& gradients,
           bool balanced)
      : single_(single), parameters_(parameters), gradients_(gradients), balanced_(balanced) {
    uses_.assign(single.tensors.size(), 0);
    for (const Op& op : single.ops)
      for (TensorId id : op.inputs)
        if (id) ++uses_[id.value];
    producer_.assign(single.tensors.size(), -1);
    for (size_t i = 0; i < single.ops.size(); ++i)
      for (TensorId id : single.ops[i].outputs) producer_[id.value] = int32_t(i);
    for (size_t i = 0; i < single.tensors.size(); ++i)
      shared_.push_back(single.tensors[i].persistent ? result_.add(single.tensors[i]) : TensorId{});
    sums_.resize(gradients.size());
    tree_.resize(gradients.size());
  }

  Program run(const ScheduleStage& schedule) {
    maps_.assign(schedule.microbatches, shared_);
    placed_.assign(schedule.microbatches, std::vector<int32_t>(single_.ops.size(), -1));
    for (const Pass& pass : schedule.order) {
      for (size_t i = 0; i < single_.ops.size(); ++i)
        if ((single_.ops[i].stage == Stage::forward) == (pass.stage == Stage::forward)) place(i, pass.microbatch);
      if (pass.stage == Stage::backward) balanced_ ? grow(pass.microbatch) : accumulate(pass.microbatch);
    }
    if (balanced_) close_trees(schedule.microbatches - 1);
    for (int m = 0; m < schedule.microbatches; ++m)
      for (TensorId loss : single_.losses) {
        result_.losses.push_back(mapped(loss, m));
        result_[result_.losses.back()].step_output = true;
      }
    for (int m = 0; m < schedule.microbatches; ++m)
      for (const auto& [tensor, forms] : single_.forms) {
        auto& copies = result_.forms[mapped({tensor}, m).value];
        for (RestingForm form : forms) {
          for (auto* list : {&form.rest, &form.restore})
            for (Op& op : *list) {
              for (TensorId& id : op.inputs) id = mapped(id, m);
              for (TensorId& id : op.outputs) id = mapped(id, m);
              op.microbatch = m;
            }
          copies.push_back(std::move(form));
        }
      }
    result_.storage_directory = single_.storage_directory;
    result_.storage_limit = single_.storage_limit;
    gradients_ = sums_;
    std::vector<char> movable(result_.ops.size(), false);
    for (size_t i : additions_) movable[i] = true;
    hoist(result_, movable);
    return std::move(result_);
  }

 private:
  TensorId mapped(TensorId id, int m) {
    if (!id) return id;
    TensorId& to = maps_[m][id.value];
    if (!to) {
      Tensor tensor = single_[id];
      tensor.name += "@" + std::to_string(m);
      to = result_.add(std::move(tensor));
    }
    return to;
  }

  void place(size_t i, int m) {
    Op op = single_.ops[i];
    for (TensorId& id : op.inputs) id = mapped(id, m);
    for (TensorId& id : op.outputs) id = mapped(id, m);
    op.microbatch = m;
    placed_[m][i] = int32_t(result_.ops.size());
    result_.ops.push_back(std::move(op));
  }

  // Adds the sum so far to this microbatch's gradients: into the op that makes the first contribution where its kind
  // can accumulate and nothing else reads the bare contribution, by an addition otherwise.
  void accumulate(int m) {
    for (size_t g = 0; g < gradients_.size(); ++g) {
      if (!gradients_[g]) continue;
      const TensorId now = mapped(gradients_[g], m);
      result_[now].role = Role::gradient;
      if (sums_[g] && !fold(gradients_[g], sums_[g], m)) {
        sums_[g] = add(g, sums_[g], now, m);
      } else {
        sums_[g] = now;
      }
    }
  }

  // Balanced sums: partial sums of 1, 2, 4, … microbatches wait, and two of a size are added.
  struct Partial {
    TensorId sum;
    int count;
  };
  TensorId add(size_t g, TensorId a, TensorId b, int m) {
    Builder build(result_);
    build.stage = Stage::backward;
    build.microbatch = m;
    build.role = Role::gradient;
    additions_.push_back(result_.ops.size());
    const TensorId sum = build.emit("add", {a, b}, {}, result_[parameters_[g]].name + ".gradient");
    result_[sum].layout = result_[a].layout;
    return sum;
  }
  void grow(int m) {
    for (size_t g = 0; g < gradients_.size(); ++g) {
      if (!gradients_[g]) continue;
      const TensorId now = mapped(gradients_[g], m);
      result_[now].role = Role::gradient;
      auto& tree = tree_[g];
      tree.push_back({now, 1});
      while (tree.size() > 1 && tree[tree.size() - 2].count == tree.back().count) join(g, m);
    }
  }
  void close_trees(int m) {
    for (size_t g = 0; g < gradients_.size(); ++g) {
      while (tree_[g].size() > 1) join(g, m);
      if (!tree_[g].empty()) sums_[g] = tree_[g].front().sum;
    }
  }
  void join(size_t g, int m) {
    auto& tree = tree_[g];
    const Partial b = tree.back();
    tree.pop_back();
    tree.back() = {add(g, tree.back().sum, b.sum, m), tree.back().count + b.count};
  }

  bool fold(TensorId contribution, TensorId sum, int m) {
    for (TensorId id = contribution;;) {
      if (uses_[id.value] != (id == contribution ? 0 : 1)) return false;
      const int32_t index = producer_[id.value];
      if (index < 0) return false;
      const Op& op = single_.ops[index];
      const OpView view(single_, op);
      const int output = int(std::find(op.outputs.begin(), op.outputs.end(), id) - op.outputs.begin());
      if (view.accumulates(output)) {
        id = view.addend(output);
        continue;
      }
      if (output >= 32 || !(op.kind->accumulates >> output & 1)) return false;
      Op& placed = result_.ops[placed_[m][index]];
      if (placed.accumulate >> output & 1) return false;
      const int before = __builtin_popcount(placed.accumulate & ((1u << output) - 1));
      placed.inputs.insert(placed.inputs.end() - placed.addends() + before, sum);
      placed.accumulate |= 1u << output;
      for (TensorId out : placed.outputs)
        if (out == mapped(id, m)) result_[out].role = Role::gradient;
      return true;
    }
  }

  const Program& single_;
  const std::vector<TensorId>& parameters_;
  std::vector<TensorId>& gradients_;
  bool balanced_;
  std::vector<std::vector<Partial>> tree_;  // by gradient, the largest first
  Program result_;
  std::vector<size_t> additions_;  // ops that add up gradients
  std::vector<int> uses_;
  std::vector<int32_t> producer_;
  std::vector<TensorId> shared_, sums_;
  std::vector<std::vector<TensorId>> maps_;   // by microbatch and tensor of the single program
  std::vector<std::vector<int32_t>> placed_;  // by microbatch and op of the single program
};

}  // namespace

Program unroll(const Program& single, const std::vector<TensorId>& parameters, std::vector<TensorId>& gradients,
               const ScheduleStage& schedule, bool balanced) {
  const bool has_backward =
      std::any_of(single.ops.begin(), single.ops.end(), [](const Op& op) { return op.stage == Stage::backward; });
  check_order(schedule, has_backward);
  return Unroller(single, parameters, gradients, balanced).run(schedule);
}

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
