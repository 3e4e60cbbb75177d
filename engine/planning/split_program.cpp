// Layouts carried forward op by op; see split_program.h.
#include "engine/planning/split_program.h"

#include <algorithm>
#include <map>

#include "engine/program/sharding.h"
#include "strata/communicator.h"
#include "strata/convert.h"

namespace strata {
namespace {

std::string in_quotes(const std::string& text) { return "\"" + text + "\""; }

std::string ranks_of(const Mesh& mesh, const std::string& axis) {
  return "the " + std::to_string(mesh.size(axis)) + " ranks of axis " + in_quotes(axis);
}

int named_dimension(const Tensor& tensor, const std::string& name) {
  for (size_t d = 0; d < tensor.dimensions.size(); ++d)
    if (tensor.dimensions[d].name == name) return int(d);
  return -1;
}

const Split* split_over(const Tensor& tensor, const std::string& axis) {
  for (const Split& split : tensor.layout)
    if (split.axis == axis) return &split;
  return nullptr;
}

bool runs_on(const Program& program, Stream stream) {
  return std::any_of(program.ops.begin(), program.ops.end(), [&](const Op& op) { return op.stream == stream; });
}
bool sends(const Program& program) { return runs_on(program, Stream::send); }
bool receives(const Program& program) { return runs_on(program, Stream::receive); }

// Whole units go to each rank, as many to each; of single elements some ranks may have one more.
void require_divisible(const Tensor& tensor, int d, const std::string& axis, const Mesh& mesh) {
  const Dimension& dimension = tensor.dimensions[size_t(d)];
  const int64_t units = tensor.shape[size_t(d)] / dimension.unit, ranks = mesh.size(axis);
  const std::string what = tensor.name + " " + text(tensor.shape, tensor.dimensions) + ": its dimension " +
                           in_quotes(dimension.name) + " has " + std::to_string(units) +
                           (dimension.unit > 1 ? " units of " + std::to_string(dimension.unit) : "");
  if (dimension.unit > 1 && units % ranks != 0)
    throw Error(what + ", which " + ranks_of(mesh, axis) + " cannot divide evenly; set mesh." + axis +
                " to a divisor of " + std::to_string(units) + ", or leave " + in_quotes(dimension.name) +
                " out of what is split.");
  if (units < ranks)
    throw Error(what + ", fewer than " + ranks_of(mesh, axis) + "; set mesh." + axis + " to " + std::to_string(units) +
                " at most, or leave " + in_quotes(dimension.name) + " out of what is split.");
}

void split_parameters(Program& program, const std::vector<NamedSplit>& splits, const Mesh& mesh) {
  for (const NamedSplit& split : splits) {
    if (split.role != Role::parameter || mesh.size(split.axis) == 1) continue;
    std::vector<std::string> names;
    bool found = false;
    for (TensorId id : program.with_role(Role::parameter)) {
      Tensor& tensor = program[id];
      for (const Dimension& dimension : tensor.dimensions) names.push_back(dimension.name);
      const int d = named_dimension(tensor, split.dimension);
      if (d < 0) continue;
      found = true;
      require_divisible(tensor, d, split.axis, mesh);
      Shape shape = tensor.shape;
      int64_t& size = shape[size_t(d)];
      tensor.layout.push_back({.dimension = d, .axis = split.axis, .full = size});
      size = share_of(size, 0, mesh.size(split.axis)).count();
      tensor.shape = std::move(shape);
    }
    if (found || receives(program) || sends(program)) continue;  // another stage of a pipeline may have them
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    throw Error("no parameter has a dimension named " + in_quotes(split.dimension) + " to split over axis " +
                in_quotes(split.axis) + "." + did_you_mean(split.dimension, names));
  }
}

// What the loader writes: each rank's part, contiguous or two chunks, and as much on each.
void split_data(Program& program, const std::vector<NamedSplit>& splits, const Mesh& mesh) {
  for (const NamedSplit& split : splits) {
    if (split.role != Role::data || mesh.size(split.axis) == 1) continue;
    bool found = false;
    for (Tensor& tensor : program.tensors) {
      const int d = tensor.role == Role::data ? named_dimension(tensor, split.dimension) : -1;
      if (d < 0) continue;
      found = true;
      const int64_t full = tensor.shape[size_t(d)], parts = mesh.size(split.axis) * (split.paired ? 2 : 1);
      if (full % parts != 0)
        throw Error(tensor.name + " " + text(tensor.shape, tensor.dimensions) + ": its dimension " +
                    in_quotes(split.dimension) + " cannot be divided evenly among " + ranks_of(mesh, split.axis) +
                    (split.paired ? ", two chunks each" : "") + "; make it a multiple of " + std::to_string(parts) +
                    ", or change mesh." + split.axis + ".");
      Shape shape = tensor.shape;
      shape[size_t(d)] = full / mesh.size(split.axis);
      tensor.layout.push_back(
          {.dimension = d, .axis = split.axis, .full = full, .pair = split.paired ? full / parts : 0});
      tensor.shape = std::move(shape);
    }
    if (!found && !receives(program) && !sends(program))
      throw Error("no data has a dimension named " + in_quotes(split.dimension) + " to split over axis " +
                  in_quotes(split.axis) + "; the model names dimensions where it declares data.");
  }
}

class Splitter {
 public:
  Splitter(Program& program, const std::vector<NamedSplit>& splits, const std::vector<TensorId>& kept, const Mesh& mesh)
      : program_(program), splits_(splits), mesh_(mesh), build_(program), kept_(program.tensors.size(), false) {
    for (const auto* list : {&kept, &std::as_const(program.losses)})
      for (TensorId id : *list)
        if (id) kept_[size_t(id.value)] = true;
    for (size_t t = 0; t < program.tensors.size(); ++t)
      if (program.tensors[t].step_output) kept_[t] = true;
    uses_.assign(program.tensors.size(), 0);
    reader_.resize(program.tensors.size());
    for (const Op& op : program.ops)
      for (TensorId id : op.inputs)
        if (id) ++uses_[size_t(id.value)], reader_[size_t(id.value)] = size_t(&op - program.ops.data());
  }

  void run() {
    split_parameters(program_, splits_, mesh_);
    split_data(program_, splits_, mesh_);
    original_ = std::move(program_.ops);
    program_.ops.clear();
    track();
    for (const Op& op : original_) place(op);
    replicate_parameters();
  }

 private:
  bool is_partial(TensorId id) const { return !partial_[size_t(id.value)].empty(); }
  bool is_plain(TensorId id) const { return program_[id].layout.empty() && !is_partial(id); }
  // What has a gradient in the end: numbers that may depend on a parameter.
  bool differentiable(TensorId id) const { return depends_[size_t(id.value)] && program_[id].dtype != DType::i32; }

  // Learns of tensors and ops that came since the last call.
  void track() {
    const size_t before = partial_.size(), now = program_.tensors.size();
    partial_.resize(now), depends_.resize(now), producer_.resize(now, -1), uses_.resize(now, 1);
    kept_.resize(now, false);
    for (size_t t = before; t < now; ++t)
      if (program_.tensors[t].role == Role::parameter) depends_[t] = true;
    for (; tracked_ < program_.ops.size(); ++tracked_) track(program_.ops[tracked_]);
  }

  void track(const Op& op) {
    const OpView view(program_, op);
    std::vector<Partial> inputs;
    bool depends = false;
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      if (op.inputs[i]) depends |= differentiable(op.inputs[i]);
      if (int(i) < view.inputs())
        inputs.push_back(view.has_input(int(i)) ? partial_[size_t(op.inputs[i].value)] : Partial());
    }
    const std::vector<Partial> outputs = partial_of(view, inputs, &mesh_);
    for (size_t o = 0; o < op.outputs.size(); ++o) {
      const size_t id = size_t(op.outputs[o].value);
      partial_[id] = outputs[o];
      depends_[id] = depends_[id] || depends;
      producer_[id] = int32_t(tracked_);
    }
    if (counting_) count_uses(op);
  }

  // Of a parameter that is whole over an axis: ops whose work the axis splits make gradients that are partial sums, the
  // others whole ones.
  void count_uses(const Op& op) {
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      if (!op.inputs[i] || program_[op.inputs[i]].role != Role::parameter) continue;
      for (const Axis& axis : mesh_.axes()) {
        if (axis.size == 1 || split_over(program_[op.inputs[i]], axis.name)) continue;
        const bool split = std::any_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) {
          return id && program_[id].role != Role::parameter && split_over(program_[id], axis.name);
        });
        Uses& uses = parameter_uses_[{op.inputs[i].value, axis.name}];
        if (split)
          uses.split.push_back({tracked_, i});
        else
          uses.whole = true;
      }
    }
  }

  void place(Op op) {
    build_.step_part = op.step_part;
    build_.block_index = op.block;
    build_.microbatch = op.microbatch;
    build_.role = Role::activation;
    if (op.stream == Stream::receive) {
      for (TensorId id : op.outputs) receive_split(id);
    } else if (op.stream == Stream::send) {
      op.inputs[0] = as_received(op.inputs[0], op);
    }
    const auto plain = [&](TensorId id) { return !id || is_plain(id); };
    if (op.stream == Stream::send || std::all_of(op.inputs.begin(), op.inputs.end(), plain)) {
      program_.ops.push_back(std::move(op));
      track();
      for (TensorId id : std::vector<TensorId>(program_.ops.back().outputs)) settle(id);
      return;
    }
    const std::vector<TensorId> outputs = op.outputs;
    std::vector<std::pair<int, TensorId>> addends;
    const OpView view(program_, op);
    for (int o = 0; o < view.outputs(); ++o)
      if (view.accumulates(o)) addends.push_back({o, view.addend(o)});
    op.inputs.resize(size_t(view.inputs()));
    op.accumulate = 0;
    const bool replaced = emit(std::move(op));
    for (const auto& [o, addend] : addends) add_back(o, outputs[size_t(o)], addend, replaced);
    for (TensorId id : outputs) settle(id);
  }

  // How a tensor crosses between ranks with programs of their own: as its named dimensions are split, which both know.
  Layout of_names(const Tensor& tensor) const {
    Layout layout;
    Shape left = tensor.full_shape();
    for (const Role role : {Role::data, Role::activation})
      for (const NamedSplit& split : splits_) {
        const int d = named_dimension(tensor, split.dimension), ranks = mesh_.size(split.axis);
        if (split.role != role || d < 0 || ranks == 1) continue;
        int64_t& size = left[size_t(d)];
        layout.push_back(
            {.dimension = d, .axis = split.axis, .full = size, .pair = split.paired ? size / ranks / 2 : 0});
        size = share_of(size, 0, ranks).count();
      }
    return layout;
  }

  void receive_split(TensorId id) {
    const Layout layout = of_names(program_[id]);
    Shape shape = program_[id].shape;
    for (const Split& split : layout)
      shape[size_t(split.dimension)] = share_of(shape[size_t(split.dimension)], 0, mesh_.size(split.axis)).count();
    program_[id].layout = layout;
    program_[id].shape = std::move(shape);
  }

  TensorId as_received(TensorId id, const Op& op) {
    const Layout wanted = of_names(program_[id]);
    for (const std::string& axis : Partial(partial_[size_t(id.value)])) sum(id, axis);
    if (program_[id].layout == wanted) return id;
    if (!wanted.empty())
      throw Error(program_[id].name + " " + text(program_[id].full_shape(), program_[id].dimensions) +
                  " is sent to ranks that take it split as its dimensions are named, but what makes it splits it "
                  "otherwise; split it alike, or let other blocks end the stage.");
    return whole(id, op);
  }

  // Emits the op on what it can take; true where others took its place.
  bool emit(Op op) {
    std::vector<std::pair<std::string, int>> replaced;  // axis, size
    if (op.kind->exchange) {
      // It says itself what it makes.
    } else if (!has_rule(*op.kind)) {
      for (TensorId& id : op.inputs)
        if (id) id = whole(id, op);
    } else {
      for (const Axis& axis : mesh_.axes())
        if (const int factor = prepare(op, axis.name); factor >= 0 && is_replaced(op.kind->sharding, factor))
          replaced.push_back({axis.name, axis.size});
    }
    if (replaced.size() > 1)
      throw Error("op kind " + in_quotes(op.kind->name) + " cannot be split over axes " + in_quotes(replaced[0].first) +
                  " and " + in_quotes(replaced[1].first) + " at once, as " + program_[op.inputs[1]].name +
                  " is; split it over one of them.");
    if (!replaced.empty()) {
      replace(op, replaced[0].first, replaced[0].second);
      return true;
    }
    Op bare = op;  // shapes and layouts come from the inputs alone
    bare.outputs.clear();
    const OpView view(program_, bare);
    const std::vector<TensorSpec> specs = op.kind->shape(view);
    std::vector<Layout> layouts = layouts_of(view);
    layouts.resize(specs.size());
    for (size_t o = 0; o < specs.size(); ++o) {
      Tensor& output = program_[op.outputs[o]];
      output.shape = specs[o].shape;
      output.layout = layouts[o];
    }
    program_.ops.push_back(std::move(op));
    track();
    return false;
  }

  void replace(const Op& op, const std::string& axis, int size) {
    const size_t first = program_.ops.size();
    const std::vector<TensorId> made = op.kind->sharding.replace(build_, OpView(program_, op), axis, size);
    STRATA_CHECK(made.size() == op.outputs.size());
    counting_ = false;  // what takes the place of an op answers for its parameters' gradients
    track();
    counting_ = true;
    for (size_t o = 0; o < made.size(); ++o) {
      Tensor &to = program_[op.outputs[o]], &from = program_[made[o]];
      to.shape = from.shape, to.layout = from.layout;
      partial_[size_t(op.outputs[o].value)] = partial_[size_t(made[o].value)];
      depends_[size_t(op.outputs[o].value)] = depends_[size_t(made[o].value)];
      for (size_t i = first; i < program_.ops.size(); ++i) {
        std::replace(program_.ops[i].inputs.begin(), program_.ops[i].inputs.end(), made[o], op.outputs[o]);
        std::replace(program_.ops[i].outputs.begin(), program_.ops[i].outputs.end(), made[o], op.outputs[o]);
      }
      producer_[size_t(op.outputs[o].value)] = producer_[size_t(made[o].value)];
    }
  }

  // The addend of an output: into the op again where both are split alike, otherwise by an op of its own.
  void add_back(int output, TensorId result, TensorId addend, bool replaced) {
    const bool alike = program_[result].layout == program_[addend].layout &&
                       partial_[size_t(result.value)] == partial_[size_t(addend.value)];
    if (alike && !replaced) {
      Op& op = program_.ops.back();
      op.inputs.push_back(addend);
      op.accumulate |= 1u << output;
      return;
    }
    const TensorId bare = displace(result, ".bare");
    Op add = make_op("add", {addend, bare}, {result});
    add.step_part = build_.step_part, add.block = build_.block_index, add.microbatch = build_.microbatch;
    emit(std::move(add));
  }

  // The op that made a tensor makes a new one instead, which is returned; the tensor is to be made of that.
  TensorId displace(TensorId id, const std::string& suffix) {
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

  // An op of the pass's own that makes `result`, which exists, or a new tensor.
  TensorId exchange(std::string_view kind, TensorId from, const std::string& axis, Attributes attributes,
                    const std::string& suffix, TensorId result = {}) {
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

  Attributes along(const std::string& axis, int dimension) const {
    return {{"dimension", int64_t(dimension)}, {"size", int64_t(mesh_.size(axis))}};
  }

  // A partial sum is summed: all of it everywhere, or each rank's share along `dimension`.
  void sum(TensorId id, const std::string& axis, int dimension = -1) {
    const TensorId partial = displace(id, ".partial");
    if (dimension < 0)
      exchange("all_reduce", partial, axis, {{"reduction", std::string("sum")}}, "", id);
    else
      exchange("reduce_scatter", partial, axis, along(axis, dimension), "", id);
    Partial left = partial_[size_t(partial.value)];
    left.erase(axis);
    partial_[size_t(id.value)] = left;
  }

  // What a split tensor, or a whole one, is for an op that wants it otherwise; made once.
  TensorId converted(TensorId id, const std::string& kind, const std::string& axis, const Attributes& attributes,
                     const std::string& suffix) {
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

  TensorId gathered(TensorId id, const std::string& axis, bool work_is_split) {
    const Split* split = split_over(program_[id], axis);
    require_contiguous(id, *split);
    Attributes attributes = along(axis, split->dimension);
    if (!work_is_split) attributes.set("gradient", std::string("whole"));
    return converted(id, "all_gather", axis, attributes, ".whole");
  }

  // What ranks have of pairs of chunks comes together in their order.
  void require_contiguous(TensorId id, const Split& split) const {
    if (split.pair > 0)
      throw Error("an op needs " + program_[id].name + " " + text(program_[id].full_shape()) + " otherwise than axis " +
                  in_quotes(split.axis) +
                  " splits it, but each rank has two chunks of it, which exchanges do not put in order; give the op's "
                  "kind a sharding rule (OpKind::sharding), or split it contiguously.");
  }

  // For kinds without a sharding rule.
  TensorId whole(TensorId id, const Op& op) {
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

  // One axis: which factor of the op it splits (-1: none), and inputs that fit.
  int prepare(Op& op, const std::string& axis) {
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

  // Where a partial sum would wait: if what is made of it ends where each rank has a share, the factor that is shared
  // then. It is better summed at once to shares, which is as many bytes, and what lies between is less work.
  int wanted_factor(const Op& op, const Factors& all, const std::string& axis) const {
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
  bool needs_whole(const Op& op, int factor, const std::string& axis) const {
    const Sharding& rule = op.kind->sharding;
    if (strata::needs_whole(rule, factor)) return true;
    return needs_data_axis(rule, factor) && std::none_of(splits_.begin(), splits_.end(), [&](const NamedSplit& split) {
             return split.role == Role::data && split.axis == axis;
           });
  }
  bool can_split(const Op& op, const Factors& all, int factor, const std::string& axis) const {
    const bool there = std::any_of(all.inputs.begin(), all.inputs.end(), [&](const std::vector<int>& input) {
      return Factors::dimension_of(input, factor) >= 0;
    });
    return factor >= 0 && there && !needs_whole(op, factor, axis);
  }

  // Whether a partial sum may go through the op: it is linear in all that are partial sums, and all in which it is are.
  bool stays_partial(const Op& op, const std::string& axis) const {
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

  // An input that is whole or split, as the op wants it: split along `dimension`, or whole where that is -1.
  TensorId fitted(TensorId id, const std::string& axis, int dimension, bool work_is_split, bool once) {
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

  // The factor that an axis splits. Parameters are as they are; of activations the most bytes stay where they are.
  int choose(const Op& op, const Factors& all, const std::string& axis) const {
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

  [[noreturn]] void refuse(const Op& op, TensorId id, const std::string& axis, TensorId other) const {
    const Tensor& tensor = program_[id];
    throw Error("op kind " + in_quotes(op.kind->name) + ", which makes " + program_[op.outputs[0]].name +
                ", cannot take " + tensor.name + " " + text(tensor.full_shape(), tensor.dimensions) + " as axis " +
                in_quotes(axis) + " splits it" +
                (other ? " beside " + program_[other].name + " " +
                             text(program_[other].full_shape(), program_[other].dimensions)
                       : "") +
                "; leave that dimension out of what is split.");
  }

  // What an op has left: named tensors as plugins want them, what is kept whole, and no partial sum that two would sum.
  void settle(TensorId id) {
    for (const NamedSplit& split : splits_)
      if (split.role == Role::activation && mesh_.size(split.axis) > 1)
        if (const int d = named_dimension(program_[id], split.dimension); d >= 0) lay_out(id, split.axis, d);
    if (is_loss(id) && mesh_.size(kSequenceAxis) > 1) settle_loss(id);
    const bool whole = kept_[size_t(id.value)], named = !program_[id].dimensions.empty();
    if (whole || named || uses_[size_t(id.value)] > 1)
      for (const std::string& axis : Partial(partial_[size_t(id.value)]))
        if (axis != kSequenceAxis || !is_loss(id)) sum(id, axis);
    while (whole && !program_[id].layout.empty()) {
      const Split split = program_[id].layout.back();
      Attributes attributes = along(split.axis, split.dimension);
      attributes.set("gradient", std::string("whole"));
      exchange("all_gather", displace(id, ".share"), split.axis, attributes, "", id);
    }
  }

  bool is_loss(TensorId id) const {
    return std::find(program_.losses.begin(), program_.losses.end(), id) != program_.losses.end();
  }
  // Ranks that have tokens of their own keep what those add to a loss: who reports it adds that up (Mesh::counts).
  void settle_loss(TensorId id) const {
    if (!partial_[size_t(id.value)].contains(std::string(kSequenceAxis)))
      throw Error(
          "the loss " + program_[id].name + " is not a sum over tokens, which axis " +
          in_quotes(std::string(kSequenceAxis)) +
          " divides; give the kinds that make it sharding rules (OpKind::sharding), or set mesh.sequence to 1.");
  }

  void lay_out(TensorId id, const std::string& axis, int d) {
    if (split_over(program_[id], axis)) return;
    if (program_[id].shape[size_t(d)] % mesh_.size(axis) != 0)
      throw Error(program_[id].name + " " + text(program_[id].shape, program_[id].dimensions) + ": its dimension " +
                  in_quotes(program_[id].dimensions[size_t(d)].name) + " cannot be divided evenly among " +
                  ranks_of(mesh_, axis) + "; choose another size, or do not split it.");
    if (partial_[size_t(id.value)].contains(axis))
      sum(id, axis, d);
    else
      exchange("local_slice", displace(id, ".whole"), axis, along(axis, d), "", id);
  }

  // A parameter of which some ops make whole gradients and others partial sums: those are summed at once.
  void replicate_parameters() {
    std::vector<std::pair<Use, std::string>> inserted;
    for (const auto& [key, uses] : parameter_uses_)
      if (uses.whole)
        for (const Use& use : uses.split) inserted.push_back({use, key.second});
    std::stable_sort(inserted.begin(), inserted.end(),
                     [](const auto& a, const auto& b) { return b.first.op < a.first.op; });
    for (const auto& [use, axis] : inserted) {
      Op& user = program_.ops[use.op];
      const TensorId parameter = user.inputs[use.input];
      Tensor copy{.name = program_[parameter].name + ".replicated",
                  .shape = program_[parameter].shape,
                  .dtype = program_[parameter].dtype,
                  .layout = program_[parameter].layout};
      Op replicated = make_op("replicated", {parameter}, {}, {{"axis", axis}});
      replicated.step_part = user.step_part, replicated.block = user.block, replicated.microbatch = user.microbatch;
      const TensorId made = program_.add(std::move(copy));
      user.inputs[use.input] = made;
      replicated.outputs = {made};
      program_.ops.insert(program_.ops.begin() + int64_t(use.op), std::move(replicated));
    }
  }

  struct Use {
    size_t op, input;
  };
  struct Uses {
    bool whole = false;
    std::vector<Use> split{};
  };

  Program& program_;
  const std::vector<NamedSplit>& splits_;
  const Mesh& mesh_;
  Builder build_;
  std::vector<char> kept_, depends_;  // by tensor
  std::vector<Op> original_;          // as they were before anything was split
  std::vector<int> uses_;             // by tensor: inputs of those that it is
  std::vector<size_t> reader_;        // by tensor: the last of those ops that reads it
  std::vector<Partial> partial_;
  std::vector<int32_t> producer_;  // by tensor: op of the new list
  size_t tracked_ = 0;             // ops of the new list that have been looked at
  bool counting_ = true;
  std::map<std::pair<int32_t, std::string>, TensorId> made_;  // conversions, by tensor and what is made of it
  std::map<std::pair<int32_t, std::string>, Uses> parameter_uses_;
};

}  // namespace

void split_program(Program& program, const std::vector<NamedSplit>& splits, const std::vector<TensorId>& kept,
                   const Mesh& mesh) {
  const auto splits_something = [&](const NamedSplit& split) { return mesh.size(split.axis) > 1; };
  if (std::any_of(splits.begin(), splits.end(), splits_something)) Splitter(program, splits, kept, mesh).run();
}

}  // namespace strata
