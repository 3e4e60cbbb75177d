// Walks the forward ops backwards; see autodiff.h.
#include "engine/program/autodiff.h"

#include <algorithm>

#include "strata/builder.h"

namespace strata {
namespace {

class Walk {
 public:
  Walk(Program& program, const std::vector<Root>& roots, const std::vector<TensorId>& wanted,
       const std::vector<TensorId>& apart)
      : program_(program), build_(program), forward_ops_(program.ops.size()), apart_(apart) {
    needs_.assign(program.tensors.size(), false);
    for (TensorId id : wanted) needs_[id.value] = true;
    for (const Op& op : program.ops)
      if (std::any_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) { return id && needs_[id.value]; }))
        for (TensorId id : op.outputs) needs_[id.value] = true;
    gradient_.resize(program.tensors.size());
    holders_.resize(program.tensors.size());
    is_loss_.assign(program.tensors.size(), false);
    build_.step_part = StepPart::backward;
    for (const Root& root : roots) {
      TensorId& known = gradient_[size_t(root.tensor.value)];
      if (!root.gradient)
        is_loss_[size_t(root.tensor.value)] = true;
      else
        give(known, known ? build_.emit("add", {known, root.gradient}) : root.gradient);
    }
  }

  void run() {
    std::vector<char> dropped(forward_ops_, false);
    for (size_t i = forward_ops_; i-- > 0;) dropped[i] = visit(program_.ops[i]);  // a copy: rules grow the list
    size_t i = 0;
    std::erase_if(program_.ops, [&](const Op&) {
      const bool drop = i < forward_ops_ && dropped[i];
      ++i;
      return drop;
    });
    first_backward_ = forward_ops_ - size_t(std::count(dropped.begin(), dropped.end(), char(true)));
  }

  // Pairs of the ops that run() made which their kinds declare to be one; `kept` are tensors that somebody else will
  // read.
  void fuse(const std::vector<TensorId>& kept) {
    std::vector<int> readers(program_.tensors.size());
    for (const Op& op : program_.ops)
      for (TensorId id : op.inputs)
        if (id) ++readers[size_t(id.value)];
    for (TensorId id : kept)
      if (id) ++readers[size_t(id.value)];
    std::vector<Op> fused;
    for (Op& op : program_.ops) {
      if (fused.size() > first_backward_ && op.accumulate == 0) {
        const Op& before = fused.back();
        for (const auto& [kind, together] : op.kind->fusions)
          if (before.kind->name == kind && before.outputs.size() == 1 && before.accumulate == 0 &&
              before.outputs[0] == op.inputs[0] && readers[size_t(op.inputs[0].value)] == 1) {
            op.inputs.erase(op.inputs.begin());
            op.inputs.insert(op.inputs.begin(), before.inputs.begin(), before.inputs.end());
            op.kind = &find_kind(together);
            fused.pop_back();
            break;
          }
      }
      fused.push_back(std::move(op));
    }
    program_.ops = std::move(fused);
  }

  TensorId gradient(TensorId id) const { return gradient_.at(id.value); }
  const std::vector<std::pair<TensorId, TensorId>>& more() const { return more_; }
  std::vector<TensorId> gradients_of_activations() const {
    std::vector<TensorId> list;
    for (size_t t = 0; t < gradient_.size(); ++t)
      if (gradient_[t] && program_.tensors[t].role != Role::parameter) list.push_back(gradient_[t]);
    return list;
  }

 private:
  class Rule;

  bool visit(Op op);
  void contribute(TensorId to, TensorId contribution, size_t first_op_of_rule);
  // Entries of gradient_ are counted, so that nobody has to look through them all.
  void give(TensorId& entry, TensorId gradient) {
    if (entry) --holders_[size_t(entry.value)];
    holders_.resize(program_.tensors.size());
    ++holders_[size_t(gradient.value)];
    entry = gradient;
  }
  bool is_held(TensorId id) const { return size_t(id.value) < holders_.size() && holders_[size_t(id.value)] > 0; }

  Program& program_;
  Builder build_;
  size_t forward_ops_, first_backward_ = 0;
  std::vector<char> needs_, is_loss_;
  std::vector<TensorId> gradient_;  // by forward tensor
  std::vector<int> holders_;        // by tensor: entries of gradient_ and more_ that are it
  const std::vector<TensorId>& apart_;
  std::vector<std::pair<TensorId, TensorId>> more_;  // contributions beyond the first to those of apart_
};

class Walk::Rule final : public Differentiation {
 public:
  Rule(Walk& walk, const OpView& view) : walk_(walk), view_(view), first_(walk.program_.ops.size()) {}
  const OpView& forward() const override { return view_; }
  Builder& build() override { return walk_.build_; }
  TensorId output_gradient(int i) const override { return walk_.gradient_[view_.op().outputs.at(i).value]; }
  bool needs(int i) const override { return view_.has_input(i) && walk_.needs_[view_.op().inputs[i].value]; }
  void set(int i, TensorId gradient) override {
    if (needs(i)) walk_.contribute(view_.op().inputs[i], gradient, first_);
  }
  void replaces_forward() override { replaced = true; }
  bool replaced = false;

 private:
  Walk& walk_;
  OpView view_;
  size_t first_;
};

bool Walk::visit(Op op) {
  const auto flows = [&](TensorId id) { return is_loss_[id.value] || bool(gradient_[id.value]); };
  const auto needed = [&](TensorId id) { return id && needs_[id.value]; };
  if (std::none_of(op.outputs.begin(), op.outputs.end(), flows)) return false;
  if (std::none_of(op.inputs.begin(), op.inputs.end(), needed)) return false;
  if (!op.kind->gradient)
    throw Error("op kind \"" + op.kind->name +
                "\" has no gradient rule, but the loss depends on a parameter through it.");
  build_.block_index = op.block;
  build_.microbatch = op.microbatch;
  const OpView view(program_, op);
  Rule rule(*this, view);
  const size_t first = program_.ops.size();
  op.kind->gradient(rule);
  // An addend passes its output's gradient on unchanged.
  for (int o = 0; o < view.outputs(); ++o)
    if (view.accumulates(o) && needed(view.addend(o)))
      contribute(view.addend(o), gradient_[op.outputs[o].value], first);
  return rule.replaced;
}

void Walk::contribute(TensorId to, TensorId contribution, size_t first) {
  // A tensor made for a parameter alone is its gradient, or a part of it; one passed on from above is not.
  if (program_[to].role == Role::parameter && contribution.value >= int32_t(gradient_.size()) && !is_held(contribution))
    program_[contribution].role = Role::gradient;
  TensorId& sum = gradient_[to.value];
  if (!sum) {
    give(sum, contribution);
    return;
  }
  if (std::find(apart_.begin(), apart_.end(), to) != apart_.end()) {
    give(more_.emplace_back(to, TensorId{}).second, contribution);
    return;
  }
  // Let the op that makes the contribution add the sum so far itself, when nothing else reads the bare contribution.
  auto& ops = program_.ops;
  const auto reads = [&](const Op& op) {
    return std::find(op.inputs.begin(), op.inputs.end(), contribution) != op.inputs.end();
  };
  if (!is_held(contribution) && std::none_of(ops.begin() + first, ops.end(), reads)) {
    for (size_t i = first; i < ops.size(); ++i) {
      const auto at = std::find(ops[i].outputs.begin(), ops[i].outputs.end(), contribution);
      if (at == ops[i].outputs.end()) continue;
      const int output = int(at - ops[i].outputs.begin());
      if (!((ops[i].kind->accumulates & ~ops[i].accumulate) >> output & 1)) break;
      const int before = __builtin_popcount(ops[i].accumulate & ((1u << output) - 1));
      ops[i].inputs.insert(ops[i].inputs.end() - ops[i].addends() + before, sum);
      ops[i].accumulate |= 1u << output;
      give(sum, contribution);
      return;
    }
  }
  give(sum, build_.emit("add", {sum, contribution}));
}

}  // namespace

Differentiated differentiate(Program& program, const std::vector<Root>& roots, const std::vector<TensorId>& wanted,
                             const std::vector<TensorId>& apart) {
  Walk walk(program, roots, wanted, apart);
  walk.run();
  Differentiated result;
  for (TensorId id : wanted) result.wanted.push_back(walk.gradient(id));
  result.activations = walk.gradients_of_activations();
  result.more = walk.more();
  std::vector<TensorId> kept = result.wanted;
  for (const auto& [of, gradient] : result.more) kept.push_back(gradient);
  walk.fuse(kept);
  return result;
}

}  // namespace strata
