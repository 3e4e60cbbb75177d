// How an axis divides the work of one op: the factor that is split, where its inputs are not split alike; see
// splitter.h.
#include <algorithm>
#include <map>

#include "engine/planning/splitter.h"
#include "strata/convert.h"

namespace strata {

int Splitter::prepare(Op& op, const std::string& axis) {
  if (mesh_.size(axis) == 1) return -1;
  bool touched = false;
  for (TensorId id : op.inputs)
    if (id) touched = touched || partial_[size_t(id.value)].contains(axis) || split_over(program_[id], axis);
  if (!touched) return -1;
  const Factors all = factors_of(OpView(program_, op));
  const int chosen = choose(op, all, axis);
  const bool may_wait = chosen < 0 && stays_partial(op, axis);
  const int factor = may_wait ? wanted_factor(op, all, axis) : chosen;
  const bool waits = may_wait && factor < 0;
  const bool lacks = std::any_of(all.outputs.begin(), all.outputs.end(), [&](const std::vector<int>& output) {
    return Factors::dimension_of(output, factor) < 0;
  });
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    TensorId& id = op.inputs[i];
    if (!id) continue;
    const int dimension = factor < 0 ? -1 : Factors::dimension_of(all.inputs[i], factor);
    const bool added = op.kind->sharding.added >> i & 1;
    if (waits) {
      if (added) id = converted(id, "counted_once", axis, {{"coordinate", int64_t{0}}}, ".once");
      continue;
    }
    // Rows of several dimensions are split where they were made, or not at all.
    if (dimension >= 0 && all.inputs[i][size_t(dimension)] == kMerged) {
      const Split* split = split_over(program_[id], axis);
      STRATA_CHECK(split && split->dimension == dimension);
    }
    if (partial_[size_t(id.value)].contains(axis)) sum(id, axis, dimension);
    id = fitted(id, axis, dimension, factor >= 0, added && lacks);
  }
  return factor;
}

int Splitter::wanted_factor(const Op& op, const Factors& all, const std::string& axis) const {
  const Op* at = &op;
  Factors factors = all;
  std::vector<int> names = all.outputs.at(0);  // by dimension, which of `op` it is
  while (at->outputs.size() == 1) {
    const TensorId made = at->outputs[0];
    for (const NamedSplit& split : splits_)
      if (const int d = named_dimension(program_[made], split.dimension);
          d >= 0 && split.axis == axis && split.role == Role::activation)
        return can_split(op, all, names[size_t(d)], axis) ? names[size_t(d)] : -1;
    if (size_t(made.value) >= reader_.size() || uses_[size_t(made.value)] != 1) return -1;
    at = &original_[reader_[size_t(made.value)]];
    if (!has_rule(*at->kind) || at->accumulate != 0) return -1;
    factors = factors_of(OpView(program_, *at));
    const size_t input = size_t(std::find(at->inputs.begin(), at->inputs.end(), made) - at->inputs.begin());
    for (size_t i = 0; i < at->inputs.size(); ++i) {  // what it meets there
      const Split* split = i != input && at->inputs[i] ? split_over(program_[at->inputs[i]], axis) : nullptr;
      if (!split) continue;
      const int d = Factors::dimension_of(factors.inputs[input], factors.inputs[i][size_t(split->dimension)]);
      return d >= 0 && can_split(op, all, names[size_t(d)], axis) ? names[size_t(d)] : -1;
    }
    if (factors.inputs[input] != factors.outputs[0] || !(at->kind->sharding.linear >> input & 1)) return -1;
  }
  return -1;
}

bool Splitter::needs_whole(const Op& op, int factor, const std::string& axis) const {
  const Sharding& rule = op.kind->sharding;
  if (strata::needs_whole(rule, factor)) return true;
  return needs_data_axis(rule, factor) && std::none_of(splits_.begin(), splits_.end(), [&](const NamedSplit& split) {
           return split.role == Role::data && split.axis == axis;
         });
}

bool Splitter::can_split(const Op& op, const Factors& all, int factor, const std::string& axis) const {
  const bool there = std::any_of(all.inputs.begin(), all.inputs.end(), [&](const std::vector<int>& input) {
    return Factors::dimension_of(input, factor) >= 0;
  });
  return factor >= 0 && there && !needs_whole(op, factor, axis);
}

bool Splitter::stays_partial(const Op& op, const std::string& axis) const {
  const Sharding& rule = op.kind->sharding;
  bool any = false;
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    if (!op.inputs[i]) continue;
    const bool partial = partial_[size_t(op.inputs[i].value)].contains(axis);
    if (partial != bool(rule.linear >> i & 1)) return false;
    any |= partial;
  }
  return any;
}

int Splitter::choose(const Op& op, const Factors& all, const std::string& axis) const {
  std::map<int, int64_t> bytes;  // by factor, of activations
  int fixed = -1;
  TensorId fixes;
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    const TensorId id = op.inputs[i];
    const Split* split = id ? split_over(program_[id], axis) : nullptr;
    if (!split) continue;
    const int factor = all.inputs[i][size_t(split->dimension)];
    if (!program_[id].persistent) {
      if (factor >= 0) bytes[factor] += program_[id].bytes();
      continue;
    }
    if (needs_whole(op, factor, axis) || (fixed >= 0 && fixed != factor)) refuse(op, id, axis, fixes);
    fixed = factor, fixes = id;
  }
  const auto whole_parameter = [&](int factor) {
    for (size_t i = 0; i < op.inputs.size(); ++i)
      if (op.inputs[i] && program_[op.inputs[i]].persistent && !split_over(program_[op.inputs[i]], axis) &&
          Factors::dimension_of(all.inputs[i], factor) >= 0)
        return op.inputs[i];
    return TensorId{};
  };
  if (fixed >= 0) {
    if (const TensorId other = whole_parameter(fixed)) refuse(op, fixes, axis, other);
    return fixed;
  }
  int chosen = -1;
  for (const auto& [factor, size] : bytes)
    if (!needs_whole(op, factor, axis) && !whole_parameter(factor) && (chosen < 0 || size > bytes[chosen]))
      chosen = factor;
  return chosen;
}

void Splitter::refuse(const Op& op, TensorId id, const std::string& axis, TensorId other) const {
  const Tensor& tensor = program_[id];
  throw Error(
      "op kind " + in_quotes(op.kind->name) + ", which makes " + program_[op.outputs[0]].name + ", cannot take " +
      tensor.name + " " + text(tensor.full_shape(), tensor.dimensions) + " as axis " + in_quotes(axis) + " splits it" +
      (other ? " beside " + program_[other].name + " " + text(program_[other].full_shape(), program_[other].dimensions)
             : "") +
      "; leave that dimension out of what is split.");
}

}  // namespace strata
