// Exchanges between ops that split a tensor otherwise: sums of partial sums, gathers, slices, turns; see splitter.h.
#include <algorithm>

#include "engine/planning/splitter.h"
#include "strata/convert.h"

namespace strata {

TensorId Splitter::displace(TensorId id, const std::string& suffix) {
  Tensor copy = program_[id];
  copy.name = copy.name + suffix;
  copy.dimensions = Dimensions();
  copy.step_output = false;
  const TensorId made = program_.add(std::move(copy));
  track();
  partial_[size_t(made.value)] = partial_[size_t(id.value)];
  depends_[size_t(made.value)] = depends_[size_t(id.value)];
  const int32_t producer = producer_[size_t(id.value)];
  STRATA_CHECK(producer >= 0);
  Op& op = program_.ops[size_t(producer)];
  std::replace(op.outputs.begin(), op.outputs.end(), id, made);
  producer_[size_t(made.value)] = producer;
  return made;
}

TensorId Splitter::exchange(std::string_view kind, TensorId from, const std::string& axis, Attributes attributes,
                            const std::string& suffix, TensorId result) {
  attributes.set("axis", axis);
  const Name name = program_[from].name + suffix;
  const TensorId made = build_.emit_all(kind, {from}, attributes, {result}, name)[0];
  if (result) {
    Op bare = program_.ops.back();
    bare.outputs.clear();
    const OpView view(program_, bare);
    program_[result].shape = bare.kind->shape(view)[0].shape;
    const std::vector<Layout> layouts = layouts_of(view);
    program_[result].layout = layouts.empty() ? Layout() : layouts[0];
  }
  track();
  return made;
}

void Splitter::sum(TensorId id, const std::string& axis, int dimension) {
  const TensorId partial = displace(id, ".partial");
  if (dimension < 0)
    exchange("all_reduce", partial, axis, {{"reduction", std::string("sum")}}, "", id);
  else
    exchange("reduce_scatter", partial, axis, along(axis, dimension), "", id);
  Partial left = partial_[size_t(partial.value)];
  left.erase(axis);
  partial_[size_t(id.value)] = left;
}

TensorId Splitter::converted(TensorId id, const std::string& kind, const std::string& axis,
                             const Attributes& attributes, const std::string& suffix) {
  std::string key = kind + " " + axis;
  for (const auto& [name, value] : attributes.all()) {
    key += " " + name + " ";
    if (const auto* number = std::get_if<int64_t>(&value)) key += std::to_string(*number);
    if (const auto* word = std::get_if<std::string>(&value)) key += *word;
  }
  if (const auto known = made_.find({id.value, key}); known != made_.end()) return known->second;
  const TensorId made = exchange(kind, id, axis, attributes, suffix);
  made_[{id.value, key}] = made;
  return made;
}

TensorId Splitter::gathered(TensorId id, const std::string& axis, bool work_is_split) {
  const Split* split = split_over(program_[id], axis);
  require_contiguous(id, *split);
  Attributes attributes = along(axis, split->dimension);
  if (!work_is_split) attributes.set("gradient", std::string("whole"));
  return converted(id, "all_gather", axis, attributes, ".whole");
}

void Splitter::require_contiguous(TensorId id, const Split& split) const {
  if (split.pair > 0)
    throw Error("an op needs " + program_[id].name + " " + text(program_[id].full_shape()) + " otherwise than axis " +
                in_quotes(split.axis) +
                " splits it, but each rank has two chunks of it, which exchanges do not put in order; give the op's "
                "kind a sharding rule (OpKind::sharding), or split it contiguously.");
}

TensorId Splitter::whole(TensorId id, const Op& op) {
  const Partial partial = partial_[size_t(id.value)];
  for (const std::string& axis : partial) sum(id, axis);
  while (!program_[id].layout.empty()) {
    const std::string axis = program_[id].layout.back().axis;
    if (program_[id].persistent)
      throw Error("op kind " + in_quotes(op.kind->name) + " has no sharding rule and needs " + program_[id].name +
                  " whole, but axis " + in_quotes(axis) +
                  " splits it; leave its dimensions out of what is split, or "
                  "give the kind a rule (OpKind::sharding).");
    id = gathered(id, axis, false);
  }
  return id;
}

TensorId Splitter::fitted(TensorId id, const std::string& axis, int dimension, bool work_is_split, bool once) {
  const Split* split = split_over(program_[id], axis);
  if (split && split->dimension == dimension) return id;
  if (split) require_contiguous(id, *split);
  if (split && dimension >= 0)
    return converted(
        id, "all_to_all", axis,
        {{"size", int64_t(mesh_.size(axis))}, {"gather", int64_t(split->dimension)}, {"split", int64_t(dimension)}},
        ".turned");
  if (split) return gathered(id, axis, work_is_split);
  if (dimension >= 0) return converted(id, "local_slice", axis, along(axis, dimension), ".slice");
  if (!work_is_split) return id;
  if (once) return converted(id, "counted_once", axis, {{"coordinate", int64_t{0}}}, ".once");
  // A gathered tensor's gradient is summed already, and a parameter's is summed with the others (Gradient::partial).
  const int32_t producer = producer_[size_t(id.value)];
  const bool gathers = producer >= 0 && program_.ops[size_t(producer)].kind->name == "all_gather" &&
                       !program_.ops[size_t(producer)].attributes.has("gradient");
  if (program_[id].role == Role::parameter || !differentiable(id) || gathers) return id;
  return converted(id, "replicated", axis, {}, ".replicated");
}

}  // namespace strata
