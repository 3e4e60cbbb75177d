// Sharding rules of ops; see sharding.h and Sharding in strata/op_kind.h.
#include "engine/program/sharding.h"

#include <algorithm>
#include <map>

#include "strata/mesh.h"

namespace strata {
namespace {

constexpr int kFirstOfLeading = 1000;  // factors of "..." are numbers from here on; letters are themselves

bool is_leading(int factor) { return factor >= kFirstOfLeading; }

// One tensor of a rule: its letters, and what stands before them.
struct Pattern {
  bool leading = false, merged = false;  // "...", "(...)"
  std::string letters;
};

struct Rule {
  std::vector<Pattern> inputs, outputs;
};

std::vector<Pattern> patterns(std::string_view text) {
  std::vector<Pattern> list;
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    std::string_view one = text.substr(0, comma);
    text.remove_prefix(std::min(comma + 1, text.size()));
    Pattern pattern;
    const auto skip = [&](std::string_view what) {
      const size_t at = one.find(what);
      if (at == one.npos) return false;
      one.remove_prefix(at + what.size());
      return true;
    };
    pattern.merged = skip("(...)");
    if (!pattern.merged) pattern.leading = skip("...");
    for (char c : one)
      if (c != ' ') pattern.letters += c;
    list.push_back(std::move(pattern));
  }
  return list;
}

Rule parse(const Sharding& sharding) {
  const std::string_view text = sharding.dimensions;
  const size_t arrow = text.find("->");
  STRATA_CHECK(arrow != text.npos);
  return {patterns(text.substr(0, arrow)), patterns(text.substr(arrow + 2))};
}

[[noreturn]] void refuse(const OpView& view, const std::string& what) {
  throw Error("the sharding rule \"" + view.op().kind->sharding.dimensions + "\" of op kind \"" + view.op().kind->name +
                  "\" " + what,
              ExitCode::failed);
}

std::vector<int> factors(const OpView& view, const Pattern& pattern, const Tensor& tensor) {
  const int dimensions = int(tensor.shape.size()), letters = int(pattern.letters.size());
  const int before = dimensions - letters;
  if (before < 0 || (pattern.merged && before != 1) || (!pattern.leading && !pattern.merged && before != 0))
    refuse(view, "does not fit " + tensor.name + " " + text(tensor.shape) + ".");
  std::vector<int> list;
  for (int d = 0; d < before; ++d) list.push_back(pattern.merged ? kMerged : kFirstOfLeading + d);
  for (char c : pattern.letters) list.push_back(c == '_' ? kNoFactor : int(c));
  return list;
}

// What a split of a dimension of `from` becomes where it is dimension `to` of another tensor. Sizes may differ: then
// both are divided evenly.
Split carried(const OpView& view, const Split& split, int64_t own, int dimension, int64_t to) {
  Split carried = split;
  carried.dimension = dimension;
  carried.first = 0;
  if (to == own) return carried;
  if (own == 0 || to * split.full % own != 0)
    refuse(view, "makes a dimension of " + std::to_string(to) + " from one of " + std::to_string(own) +
                     ", which is this rank's share of " + std::to_string(split.full) + ".");
  carried.full = to * split.full / own;
  carried.pair = to * split.pair / own;
  return carried;
}

std::vector<Layout> layouts_by_rule(const OpView& view) {
  const std::vector<TensorSpec> specs = view.outputs() > 0 ? std::vector<TensorSpec>() : view.op().kind->shape(view);
  const auto shape = [&](size_t o) -> const Shape& {
    return specs.empty() ? *view.output(int(o)).shape : specs[o].shape;
  };
  const Factors all = factors_of(view);
  std::vector<Layout> layouts(all.outputs.size());
  for (size_t o = 0; o < all.outputs.size(); ++o)
    for (int i = 0; i < view.inputs(); ++i) {
      if (!view.has_input(i)) continue;
      const Tensor& input = view.input(i);
      for (const Split& split : input.layout) {
        const int factor = all.inputs[size_t(i)][size_t(split.dimension)];
        if (factor < 0 || !is_seen(split)) continue;
        const int d = Factors::dimension_of(all.outputs[o], factor);
        const auto same = [&](const Split& known) { return known.axis == split.axis; };
        if (d < 0 || std::any_of(layouts[o].begin(), layouts[o].end(), same)) continue;
        layouts[o].push_back(carried(view, split, input.shape[size_t(split.dimension)], d, shape(o)[size_t(d)]));
        if (all.outputs[o][size_t(d)] == kMerged) layouts[o].back().pair = 0;  // no two chunks of rows
      }
    }
  return layouts;
}

bool is_split(const OpView& view) {
  for (int i = 0; i < view.inputs(); ++i)
    if (view.has_input(i) && std::ranges::any_of(view.input(i).layout, is_seen)) return true;
  return false;
}

// An exchange over an axis, or over what it is made of, leaves nothing partial there.
void remove_axis(Partial& partial, const std::string& axis, const Mesh* mesh) {
  if (!mesh) partial.erase(axis);
  if (mesh)
    for (std::string_view part : mesh->parts_of(axis)) partial.erase(std::string(part));
}

std::vector<Partial> partial_of_exchange(const OpView& view, std::vector<Partial> partial, const Mesh* mesh) {
  partial.resize(size_t(view.outputs()));
  const std::string& kind = view.op().kind->name;
  if (kind == "counted_once")
    for (Partial& one : partial) one.insert(view.attributes().string("axis"));
  if (kind == "all_reduce" || kind == "reduce_scatter")
    for (Partial& one : partial) remove_axis(one, view.attributes().string("axis"), mesh);
  return partial;
}

// Axes over which some input, but scalars, is split, with the factors that they split.
std::map<std::string, std::set<int>> split_factors(const OpView& view, const Factors& all) {
  std::map<std::string, std::set<int>> found;
  for (int i = 0; i < view.inputs(); ++i)
    if (view.has_input(i))
      for (const Split& split : view.input(i).layout)
        if (const int factor = all.inputs[size_t(i)][size_t(split.dimension)]; factor >= 0 && is_seen(split))
          found[split.axis].insert(factor);
  return found;
}

std::string dimension_text(const Tensor& tensor, int dimension) {
  if (size_t(dimension) < tensor.dimensions.size())
    return "dimension \"" + tensor.dimensions[size_t(dimension)].name + "\"";
  return "dimension " + std::to_string(dimension);
}

std::string partial_problem(const OpView& view, const Factors& all, const std::vector<Partial>& inputs,
                            const std::map<std::string, std::set<int>>& splits) {
  const Sharding& rule = view.op().kind->sharding;
  const bool takes_partial = view.attributes().has(kTakesPartial);
  Partial axes;
  for (const Partial& one : inputs) axes.insert(one.begin(), one.end());
  for (const std::string& axis : axes)
    for (int i = 0; i < view.inputs(); ++i) {
      if (!view.has_input(i)) continue;
      const bool partial = inputs[size_t(i)].contains(axis), linear = takes_partial || rule.linear >> i & 1;
      const std::string name = view.input(i).name;
      if (partial && !linear)
        return "reads " + name + ", which is a partial sum over axis \"" + axis + "\", but is not linear in it.";
      if (partial && splits.contains(axis))
        return "reads " + name + ", which is a partial sum over axis \"" + axis + "\", beside what is split over it.";
      if (!partial && linear && all.inputs[size_t(i)] != std::vector<int>{kNoFactor})
        return "adds " + name + ", which is whole, to a partial sum over axis \"" + axis + "\".";
    }
  return "";
}

}  // namespace

const Split* split_over(const Tensor& tensor, const std::string& axis) {
  for (const Split& split : tensor.layout)
    if (split.axis == axis) return &split;
  return nullptr;
}

int Factors::dimension_of(const std::vector<int>& tensor, int factor) {
  auto at = std::find(tensor.begin(), tensor.end(), factor);
  if (at == tensor.end() && is_leading(factor)) at = std::find(tensor.begin(), tensor.end(), kMerged);
  return at == tensor.end() ? -1 : int(at - tensor.begin());
}

Sharding elementwise(int inputs, int outputs, int scalars, uint32_t linear) {
  std::string text;
  for (int i = 0; i < inputs; ++i) text += i ? ", ..." : "...";
  for (int i = 0; i < scalars; ++i) text += ", _";
  text += " -> ...";
  for (int o = 1; o < outputs; ++o) text += ", ...";
  return {.dimensions = text, .linear = linear};
}

Factors factors_of(const OpView& view) {
  const Rule rule = parse(view.op().kind->sharding);
  Factors all;
  if (size_t(view.inputs()) > rule.inputs.size()) refuse(view, "has fewer inputs than the op.");
  for (int i = 0; i < view.inputs(); ++i)
    all.inputs.push_back(view.has_input(i) ? factors(view, rule.inputs[size_t(i)], view.input(i)) : std::vector<int>());
  if (view.outputs() > 0) {
    if (size_t(view.outputs()) != rule.outputs.size()) refuse(view, "has another number of outputs than the op.");
    for (int o = 0; o < view.outputs(); ++o)
      all.outputs.push_back(factors(view, rule.outputs[size_t(o)], view.output(o)));
    return all;
  }
  const std::vector<TensorSpec> specs = view.op().kind->shape(view);  // the op has no outputs yet
  if (specs.size() != rule.outputs.size()) refuse(view, "has another number of outputs than the op.");
  for (size_t o = 0; o < specs.size(); ++o)
    all.outputs.push_back(factors(view, rule.outputs[o], {.name = "an output", .shape = specs[o].shape}));
  return all;
}

namespace {
bool names(const std::string& factors, int factor) {
  return factors.find(is_leading(factor) ? '.' : char(factor)) != std::string::npos;
}
}  // namespace
bool needs_whole(const Sharding& sharding, int factor) { return names(sharding.whole, factor); }
bool needs_data_axis(const Sharding& sharding, int factor) { return names(sharding.by_data, factor); }
bool is_replaced(const Sharding& sharding, int factor) {
  return !is_leading(factor) && sharding.replaced.find(char(factor)) != std::string::npos;
}

std::vector<Layout> layouts_of(const OpView& view) {
  const OpKind& kind = *view.op().kind;
  if (kind.layout) return kind.layout(view);
  if (has_rule(kind) && is_split(view)) return layouts_by_rule(view);
  return {};
}

std::vector<Partial> partial_of(const OpView& view, const std::vector<Partial>& inputs, const Mesh* mesh) {
  const OpKind& kind = *view.op().kind;
  // What moves a tensor, or makes it fit, without looking at what it is.
  if (kind.exchange || kind.name == "move" || kind.name == "local_slice" || kind.name == "replicated" ||
      kind.name == "counted_once")
    return partial_of_exchange(view, inputs, mesh);
  std::vector<Partial> outputs(static_cast<size_t>(view.outputs()));
  if (!has_rule(kind)) return outputs;
  for (int i = 0; i < view.inputs(); ++i)
    for (Partial& output : outputs) output.insert(inputs[size_t(i)].begin(), inputs[size_t(i)].end());
  if (!is_split(view)) return outputs;
  const Factors all = factors_of(view);
  for (const auto& [axis, list] : split_factors(view, all))
    for (size_t o = 0; o < outputs.size(); ++o)
      for (int factor : list) {
        const bool there =
            Factors::dimension_of(all.outputs[o], factor) >= 0 || split_over(view.output(int(o)), axis) != nullptr;
        if (!there && (is_leading(factor) || !(kind.sharding.own >> o & 1))) outputs[o].insert(axis);
      }
  return outputs;
}

std::string split_problem(const OpView& view, const std::vector<Partial>& inputs) {
  const Sharding& rule = view.op().kind->sharding;
  const bool partial = std::any_of(inputs.begin(), inputs.end(), [](const Partial& one) { return !one.empty(); });
  if (!partial && !is_split(view)) return "";
  const Factors all = factors_of(view);
  const auto splits = split_factors(view, all);
  for (const auto& [axis, list] : splits) {
    if (list.size() > 1) return "reads tensors that axis \"" + axis + "\" splits along different dimensions.";
    const int factor = *list.begin();
    for (int i = 0; i < view.inputs(); ++i) {
      if (!view.has_input(i)) continue;
      const Tensor& input = view.input(i);
      const int d = Factors::dimension_of(all.inputs[size_t(i)], factor);
      if (d < 0) continue;
      const std::string what = dimension_text(input, d) + " of " + input.name;
      if (!split_over(input, axis)) return "needs " + what + " split over axis \"" + axis + "\", as others are.";
      if (needs_whole(rule, factor)) return "needs " + what + " whole, but axis \"" + axis + "\" splits it.";
    }
  }
  return partial_problem(view, all, inputs, splits);
}

std::vector<Partial> partial_sums(const Program& program, std::string_view after, const Mesh* mesh) {
  std::vector<Partial> partial(program.tensors.size());
  std::vector<Partial> inputs;
  for (size_t at = 0; at < program.ops.size(); ++at) {
    const Op& op = program.ops[at];
    const OpView view(program, op);
    bool plain = !op.kind->exchange;  // nothing is split or partial: most programs hold nothing else
    for (const auto* list : {&op.inputs, &op.outputs})
      for (TensorId id : *list)
        plain = plain && (!id || (program[id].layout.empty() && partial[size_t(id.value)].empty()));
    if (plain) continue;
    inputs.clear();
    for (int i = 0; i < view.inputs(); ++i)
      inputs.push_back(view.has_input(i) ? partial[size_t(op.inputs[size_t(i)].value)] : Partial());
    std::string problem = has_rule(*op.kind) ? split_problem(view, inputs) : "";
    const std::vector<Partial> outputs = problem.empty() ? partial_of(view, inputs, mesh) : std::vector<Partial>();
    for (int o = 0; problem.empty() && o < view.outputs(); ++o) {
      Partial& output = partial[size_t(op.outputs[size_t(o)].value)];
      output = outputs[size_t(o)];
      if (view.accumulates(o) && partial[size_t(view.addend(o).value)] != output)
        problem = "adds " + program[view.addend(o)].name + " to " + view.output(o).name +
                  ", but only one of the two is a partial sum.";
    }
    if (!problem.empty())
      throw Error("the program is not well formed after \"" + std::string(after) + "\": op " + std::to_string(at) +
                      " (" + op.kind->name + ") " + problem + "\n  " + print(program, op),
                  ExitCode::failed);
  }
  return partial;
}

}  // namespace strata
