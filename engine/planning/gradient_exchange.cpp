// Results and forms of gradients become exchanges; see gradient_exchange.h and strata/exchange.h.
#include "engine/planning/gradient_exchange.h"

#include <algorithm>
#include <map>
#include <set>

#include "strata/communicator.h"

namespace strata {
namespace {

Split share_of_rows(const Tensor& tensor, const std::string& axis) {
  return {.dimension = 0, .axis = axis, .full = tensor.shape[0]};
}

[[noreturn]] void refuse_second(const std::string& what, const std::string& parameter, const std::string& axis,
                                const std::string& first, const std::string& second) {
  throw Error("plugins \"" + first + "\" and \"" + second + "\" both set the " + what + " of the gradient of " +
              parameter + " over axis \"" + axis + "\"; enable only one of them.");
}

}  // namespace

void ExchangeStage::want(const Gradient& gradient, const GradientResult& result, std::string_view axis) {
  const std::string name = parameter_name(program_, gradient);
  if (result.bucket <= 0) throw Error("the bucket of an exchange must be positive.");
  if (const std::string& shared = result.shared_over; !shared.empty()) {
    const std::string wanted = "the gradient of " + name + " is wanted in shares over axis \"" + shared + "\", ";
    for (std::string_view part : mesh_.parts_of(shared))
      if (!mesh_.meet(axis, part)) throw Error(wanted + "which is no part of axis \"" + std::string(axis) + "\".");
    for (const Split& split : program_[gradient.parameter].layout)
      if (mesh_.meet(split.axis, shared))
        throw Error(wanted + "but axis \"" + split.axis + "\" splits that parameter already.");
  }
  for (std::string_view part : mesh_.parts_of(axis)) {
    const auto [at, is_first] =
        wanted_[name].emplace(part, Wanted{.result = result, .axis = std::string(axis), .by = plugin_});
    if (!is_first) refuse_second("result", name, std::string(part), at->second.by, plugin_);
  }
}

void ExchangeStage::form(const Gradient& gradient, const ExchangeForm& form, std::string_view axis) {
  const std::string name = parameter_name(program_, gradient);
  STRATA_CHECK(form.exchange);
  const auto [known, is_new] = form_named_.emplace(std::pair(plugin_, form.name), forms_.size());
  if (is_new) forms_.push_back(form);
  for (std::string_view part : mesh_.parts_of(axis)) {
    const auto [at, is_first] = formed_[name].emplace(part, Formed{.form = known->second, .by = plugin_});
    if (!is_first) refuse_second("form", name, std::string(part), at->second.by, plugin_);
  }
}

void ExchangeStage::leave(const Gradient& gradient, std::string_view axis) {
  if (mesh_.size(axis) == 1) return;
  const std::string name = parameter_name(program_, gradient);
  for (const Split& split : program_[gradient.parameter].layout)
    if (mesh_.meet(axis, split.axis))
      throw Error("each rank of axis \"" + split.axis + "\" has another part of " + name + ", so ranks of axis \"" +
                  std::string(axis) + "\" cannot train apart; let it be another axis.");
  const auto [at, is_first] = left_.emplace(name, Left{.axis = std::string(axis), .by = plugin_});
  if (!is_first) refuse_second("way in which ranks train apart", name, std::string(axis), at->second.by, plugin_);
}

void ExchangeStage::note(std::string text) {
  if (std::find(notes_.begin(), notes_.end(), text) == notes_.end()) notes_.push_back(std::move(text));
}

std::vector<TensorId> GradientBucket::sum(const std::vector<TensorId>& tensors) {
  build_.role = Role::gradient;
  Attributes attributes{{"axis", axis_}};
  if (shares_)
    attributes.set("size", int64_t(mesh_.size(axis_)));
  else
    attributes.set("reduction", std::string("sum"));
  const std::vector<TensorId> sums = build_.emit_all(shares_ ? "reduce_scatter" : "all_reduce", tensors, attributes);
  for (size_t i = 0; i < sums.size(); ++i) {
    const Tensor& from = build_[tensors[i]];
    Layout layout = from.layout;
    if (shares_) layout.push_back(share_of_rows(from, axis_));
    build_.program()[sums[i]].layout = layout;
  }
  return sums;
}

// Ranks along an axis have values of their own where the gradient is still partial over it, and where it splits a
// dimension that the state does not follow: there the state is one tensor of which each rank holds its rows, unseen.
TensorId GradientBucket::state(size_t i, std::string_view name, const Shape& shape, const FormState& state) {
  std::string full_name = parameter(i) + "." + std::string(name);
  for (std::string_view part : mesh_.parts_of(axis_))  // as whoever shares the gradient over one of them names it
    if (mesh_.size(part) > 1) full_name += "." + std::string(part);
  // Stages of a pipeline may share a parameter, and each has a gradient of it.
  if (const int program = mesh_.programs().coordinate; program > 0) full_name += "." + std::to_string(program);
  const Tensor gradient = build_[this->gradient(i)];
  const auto followed = [&](size_t d) { return state.follows.empty() ? int(d) : state.follows[d]; };
  bool right = shape.size() == (state.follows.empty() ? gradient.shape.size() : state.follows.size());
  for (size_t d = 0; right && d < shape.size(); ++d)
    right = followed(d) == FormState::kNone || (followed(d) >= 0 && size_t(followed(d)) < gradient.shape.size() &&
                                                shape[d] == gradient.shape[size_t(followed(d))]);
  if (!right)
    throw Error("state " + full_name + " of shape " + text(shape) + " does not say which dimensions of the gradient " +
                    text(*gradient.shape) + " it follows.",
                ExitCode::failed);
  const auto parts = mesh_.parts_of(axis_);
  std::vector<std::string> own;  // axes
  for (const std::string& axis : partial_.at(i))
    if (!state.alike || std::find(parts.begin(), parts.end(), axis) == parts.end()) own.push_back(axis);
  Layout seen;
  for (Split split : gradient.layout) {
    size_t d = 0;
    while (d < shape.size() && followed(d) != split.dimension) ++d;
    if (d == shape.size()) {
      own.push_back(split.axis);
      continue;
    }
    split.dimension = int(d);
    seen.push_back(split);
  }
  const TensorId id = build_.program().add({.name = full_name,
                                            .shape = shape,
                                            .dtype = state.dtype,
                                            .role = Role::optimizer_state,
                                            .persistent = true,
                                            .lasting = Lasting{.initializer = state.initializer, .begins_anew = true},
                                            .layout = seen});
  Layout layout;
  int64_t full = build_[id].full_shape()[0];
  for (const std::string& axis : own) full *= mesh_.size(axis);
  for (const std::string& axis : own) {
    if (mesh_.size(axis) == 1) continue;
    layout.push_back({.dimension = 0, .axis = axis, .full = full, .unseen = true});
    full /= mesh_.size(axis);
  }
  layout.insert(layout.end(), seen.begin(), seen.end());
  build_.program()[id].layout = layout;
  return id;
}

TensorId GradientBucket::emit(std::string_view kind, const std::vector<TensorId>& inputs, Attributes attributes) {
  build_.role = Role::gradient;
  const TensorId result = build_.emit(kind, inputs, std::move(attributes));
  if (build_[result].shape != build_[inputs.at(0)].shape)
    throw Error("op kind \"" + std::string(kind) + "\" does not work element by element: of " +
                text(build_[inputs[0]].shape) + " it makes " + text(build_[result].shape) + ".");
  build_.program()[result].layout = build_[inputs[0]].layout;
  return result;
}

int GradientExchanges::form_of(const std::string& parameter, const std::string& axis) const {
  const auto found = stage_.formed_.find(parameter);
  if (found == stage_.formed_.end()) return kFull;
  const auto parts = stage_.mesh_.parts_of(axis);
  for (std::string_view part : parts)
    if (parts.size() == 1 || stage_.mesh_.size(part) > 1) {
      const auto at = found->second.find(std::string(part));
      return at == found->second.end() ? kFull : int(at->second.form);
    }
  return kFull;
}

// Whether the sum over that axis of the grid comes in shares: over it alone, or over what it is a part of.
bool GradientExchanges::is_shared_over(const Wanted& wanted, std::string_view axis) const {
  return !wanted.result.shared_over.empty() && stage_.mesh_.meet(wanted.result.shared_over, axis);
}

GradientExchanges::When GradientExchanges::when(const std::string& parameter, const std::string& axis,
                                                const Wanted& wanted) const {
  const int form = form_of(parameter, axis);
  if (form != kFull && scaled_ && stage_.forms_[size_t(form)].needs_finite) return When::late;
  return wanted.result.each_microbatch ? When::each_microbatch : When::once;
}

void GradientExchanges::take_left(std::vector<Gradient>& gradients) const {
  const auto& left = stage_.left_;
  if (left.empty()) return;
  const ExchangeStage::Left& first = left.begin()->second;
  if (scaled_)
    throw Error(
        "plugin \"" + first.by + "\" lets the ranks of axis \"" + first.axis +
        "\" train apart, but they would have to agree on the loss scale in each step; train without loss scaling "
        "(bf16, f32).");
  for (Gradient& gradient : gradients) {
    const std::string parameter = parameter_name(stage_.program_, gradient);
    const auto found = left.find(parameter);
    if (found == left.end() || found->second.axis != first.axis)
      throw Error("plugin \"" + first.by + "\" lets ranks train apart over axis \"" + first.axis +
                      "\", but not for the gradient of " + parameter + ".",
                  ExitCode::failed);
    const auto wanted = stage_.wanted_.find(parameter);
    for (std::string_view part : stage_.mesh_.parts_of(first.axis)) {
      if (stage_.mesh_.size(part) > 1 && wanted != stage_.wanted_.end())
        if (const auto at = wanted->second.find(std::string(part));
            at != wanted->second.end() && is_shared_over(at->second, part))
          throw Error("plugin \"" + at->second.by + "\" divides what is summed over axis \"" + std::string(part) +
                      "\", but plugin \"" + first.by +
                      "\" lets its ranks train apart; give the second another axis, or leave one of them out.");
      std::erase(gradient.partial, part);
    }
  }
}

bool GradientExchanges::has_late() const {
  for (const auto& [parameter, axes] : stage_.wanted_)
    for (const auto& [axis, wanted] : axes)
      if (when(parameter, axis, wanted) == When::late) return true;
  return false;
}

// Gradients that are cut into buckets together.
struct GradientExchanges::Class {
  std::string axis;  // as it was wanted: `data` stands for two of the grid
  int64_t bucket = 0;
  std::vector<size_t> gradients{};
};

void GradientExchanges::each_microbatch(Program& single, std::vector<Gradient>& gradients) {
  for (const auto& [parameter, axes] : stage_.wanted_)
    for (const auto& [axis, wanted] : axes)
      if (wanted.result.each_microbatch && when(parameter, axis, wanted) == When::late && stage_.mesh_.size(axis) > 1) {
        const auto& formed = stage_.formed_.at(parameter).at(axis);
        throw Error("plugin \"" + wanted.by + "\" wants the gradient of " + parameter +
                    " summed in each microbatch, but the form \"" + stage_.forms_[formed.form].name +
                    "\" of plugin \"" + formed.by +
                    "\" needs finite gradients, which with loss scaling are known at the end of a step alone; sum once "
                    "a step, or train without loss scaling (bf16, f32).");
      }
  Builder build(single);
  build.step_part = StepPart::backward;
  emit(build, gradients, When::each_microbatch, nullptr);
}

void GradientExchanges::once(GradientStage& stage) {
  const Mesh& mesh = stage_.mesh_;
  emit(stage.build(), stage.gradients(), When::once, &stage);
  Program& program = stage.build().program();
  std::map<std::pair<TensorId, std::string>, TensorId>
      parts;  // by parameter and axis; gradients may be of one parameter
  for (Gradient& gradient : stage.gradients()) {
    const auto found = stage_.wanted_.find(parameter_name(program, gradient));
    if (found == stage_.wanted_.end()) continue;
    std::set<std::string> shared;
    for (const auto& [grid_axis, wanted] : found->second) {
      const std::string& axis = wanted.result.shared_over;
      if (!is_shared_over(wanted, grid_axis) || mesh.size(axis) == 1 || !shared.insert(axis).second) continue;
      TensorId& part = parts[{gradient.parameter, axis}];
      if (part) {
        gradient.parameter = part;
        continue;
      }
      const Tensor parameter = program[gradient.parameter];
      Shape shape = parameter.shape;
      shape[0] = share_of(shape[0], 0, mesh.size(axis)).count();
      gradient.parameter = part = program.add_part(gradient.parameter, parameter.name + ".part", shape, 0);
      program[gradient.parameter].layout = parameter.layout;
      program[gradient.parameter].layout.push_back(share_of_rows(parameter, axis));
    }
  }
}

// One scale stays pending on all gradients, as it was before: who looks at them all (clip) takes it for a factor.
void GradientExchanges::late(GradientStage& stage) {
  emit(stage.build(), stage.gradients(), When::late, &stage);
  for (Gradient& gradient : stage.gradients())
    if (scales_.contains(gradient.scale)) stage.materialize(gradient);
}

void GradientExchanges::emit(Builder& build, std::vector<Gradient>& gradients, When now, GradientStage* stage) {
  std::vector<Class> classes;
  for (size_t g = 0; g < gradients.size(); ++g) {
    const auto found = stage_.wanted_.find(parameter_name(build.program(), gradients[g]));
    if (found == stage_.wanted_.end()) continue;
    std::set<std::string> seen;
    for (const auto& [axis, wanted] : found->second) {
      if (!seen.insert(wanted.axis).second) continue;
      const auto same = [&, &wanted = wanted](const Class& c) {
        return c.axis == wanted.axis && c.bucket == wanted.result.bucket;
      };
      auto at = std::find_if(classes.begin(), classes.end(), same);
      if (at == classes.end()) at = classes.insert(classes.end(), Class{wanted.axis, wanted.result.bucket});
      at->gradients.push_back(g);
    }
  }
  for (const Class& one : classes) exchange_class(build, gradients, one, now, stage);
}

// An exchange of a bucket; in their order they are emitted.
struct GradientExchanges::Turn {
  int64_t order = 0;
  std::string group{};
  int form = kFull;
  bool shares = false;
  auto operator<=>(const Turn&) const = default;
};

// Sums over one axis after the other are the tree of one rank where they go from the innermost out, and each but the
// last is over a power of two of ranks.
void GradientExchanges::require_tree(const std::string& parameter, const std::vector<std::string>& axes) const {
  for (size_t a = 1; a < axes.size(); ++a)
    if (const int ranks = stage_.mesh_.size(axes[a]); (ranks & (ranks - 1)) != 0)
      throw Error("run.reproducible promises the bits of one rank, but the gradient of " + parameter +
                  " is summed over the " + std::to_string(ranks) + " ranks of axis \"" + axes[a] + "\" before axis \"" +
                  axes[a - 1] +
                  "\", which is the order of one rank only for a power of two; change the mesh, or unset it.");
}

// One exchange over an axis made of several has one form.
void GradientExchanges::require_one_form(const std::string& parameter, const Wanted& wanted) const {
  const std::string& axis = wanted.result.shared_over;
  for (std::string_view part : stage_.mesh_.parts_of(axis))
    if (stage_.mesh_.size(part) > 1 && form_of(parameter, std::string(part)) != form_of(parameter, axis))
      throw Error("plugin \"" + wanted.by + "\" wants the gradient of " + parameter + " in shares over axis \"" + axis +
                  "\", which is one exchange, but over what that is made of it is to cross in several forms; let one "
                  "form be for all of it.");
}

// What is summed over several axes in one form is one exchange over all of them. Otherwise shares come first: what they
// leave to be summed over other axes is less; in reproducible runs the innermost axis comes first, as on one rank.
void GradientExchanges::exchange_class(Builder& build, std::vector<Gradient>& gradients, const Class& one, When now,
                                       GradientStage* stage) {
  const Mesh& mesh = stage_.mesh_;
  const bool reproducible = stage_.batch_.reproducible;
  std::vector<std::string> all;  // the outermost first
  for (std::string_view axis : mesh.parts_of(one.axis))
    if (mesh.size(axis) > 1) all.emplace_back(axis);
  std::vector<Gradient> members;
  for (size_t g : one.gradients) members.push_back(gradients[g]);
  for (const std::vector<size_t>& bucket : buckets_of(build.program(), members, one.bucket)) {
    std::map<Turn, std::vector<size_t>> turns;
    for (size_t member : bucket) {
      const size_t g = one.gradients[member];
      const std::string parameter = parameter_name(build.program(), gradients[g]);
      const auto& wanted = stage_.wanted_.at(parameter);
      std::vector<std::string> groups;  // summed over one after the other, the outermost first
      std::set<std::string> shared;     // of them, those that leave shares
      std::set<int> forms;              // of the others
      for (const std::string& axis : all) {
        const Wanted& asked = wanted.at(axis);
        const auto& partial = gradients[g].partial;
        if (when(parameter, axis, asked) != now || std::find(partial.begin(), partial.end(), axis) == partial.end())
          continue;
        if (!is_shared_over(asked, axis)) {
          groups.push_back(axis);
          forms.insert(form_of(parameter, axis));
        } else if (const std::string& group = asked.result.shared_over; shared.insert(group).second) {
          groups.push_back(group);
          require_one_form(parameter, asked);
        }
      }
      if (shared.empty() && groups.size() == all.size() && forms.size() == 1) {
        turns[{.order = 2, .group = one.axis, .form = *forms.begin()}].push_back(g);
        continue;
      }
      if (reproducible) require_tree(parameter, groups);
      for (size_t a = 0; a < groups.size(); ++a) {
        const bool shares = shared.contains(groups[a]);
        const int64_t usual = shares ? 0 : !shared.empty() ? 1 : 2;
        turns[{.order = reproducible ? -int64_t(a) : usual,
               .group = groups[a],
               .form = form_of(parameter, groups[a]),
               .shares = shares}]
            .push_back(g);
      }
    }
    for (const auto& [turn, list] : turns) exchange(build, gradients, list, turn.group, turn.shares, turn.form, stage);
  }
}

void GradientExchanges::exchange(Builder& build, std::vector<Gradient>& gradients, const std::vector<size_t>& list,
                                 const std::string& group, bool shares, int form, GradientStage* stage) {
  GradientBucket bucket(build, stage_.mesh_, group, shares);
  const bool needs_finite = form != kFull && stage_.forms_[size_t(form)].needs_finite;
  for (size_t g : list) {
    Gradient& gradient = gradients[g];
    if (stage) {
      scales_.insert(gradient.scale);
      stage->materialize(gradient);
    }
    bucket.gradients_.push_back(gradient.tensor);
    bucket.overflow_.push_back(needs_finite ? gradient.scale : TensorId{});
    bucket.parameters_.push_back(parameter_name(build.program(), gradient));
    bucket.partial_.push_back(gradient.partial);
    for (std::string_view axis : stage_.mesh_.parts_of(group)) std::erase(gradient.partial, axis);
  }
  const std::vector<TensorId> results = made(form, bucket);
  for (size_t i = 0; i < list.size(); ++i) gradients[list[i]].tensor = results[i];
}

std::vector<TensorId> GradientExchanges::made(int form, GradientBucket& bucket) const {
  bucket.build().role = Role::gradient;
  return form == kFull ? bucket.sum(bucket.gradients_) : made_by(stage_.forms_[size_t(form)], bucket);
}

std::vector<TensorId> GradientExchanges::sum_over(Builder& build, std::string_view axis,
                                                  const std::vector<Gradient>& gradients,
                                                  const std::vector<TensorId>& tensors, int64_t bytes) const {
  STRATA_CHECK(gradients.size() == tensors.size());
  std::vector<std::string> axes;
  for (std::string_view part : stage_.mesh_.parts_of(axis))
    if (stage_.mesh_.size(part) > 1) axes.emplace_back(part);
  std::vector<Gradient> changes = gradients;
  for (size_t i = 0; i < changes.size(); ++i) changes[i].tensor = tensors[i], changes[i].partial = axes;
  std::vector<TensorId> sums(tensors.size());
  const size_t known = build.program().tensors.size();
  for (const std::vector<size_t>& some : buckets_of(build.program(), changes, bytes)) {
    std::map<int, std::vector<size_t>> by_form;
    for (size_t i : some)
      by_form[axes.empty() ? kFull : form_of(parameter_name(build.program(), changes[i]), axes[0])].push_back(i);
    for (const auto& [form, list] : by_form) {
      GradientBucket bucket(build, stage_.mesh_, std::string(axis), false);
      for (size_t i : list) {
        bucket.gradients_.push_back(changes[i].tensor);
        bucket.overflow_.push_back({});
        bucket.parameters_.push_back(parameter_name(build.program(), changes[i]));
        bucket.partial_.push_back(axes);
      }
      const std::vector<TensorId> results = made(form, bucket);
      for (size_t i = 0; i < list.size(); ++i) sums[list[i]] = results[i];
    }
  }
  // What forms remember of changes is each rank's own by its layout, or the same on all.
  for (size_t t = known; t < build.program().tensors.size(); ++t)
    if (Tensor& tensor = build.program().tensors[t]; tensor.persistent)
      tensor.lasting.change([](Lasting& lasting) { lasting.alike = true; });
  return sums;
}

// What a form makes of a bucket, if it is what is wanted.
std::vector<TensorId> GradientExchanges::made_by(const ExchangeForm& form, GradientBucket& bucket) {
  const std::string name = "the exchange form \"" + form.name + "\"";
  std::vector<TensorId> results;
  try {
    results = form.exchange(bucket);
  } catch (const Error& error) {
    throw Error(name + ": " + error.what(), error.code());
  }
  Program& program = bucket.build().program();
  if (results.size() != bucket.size())
    throw Error(name + " made " + std::to_string(results.size()) + " results of " + std::to_string(bucket.size()) +
                    " gradients.",
                ExitCode::failed);
  for (size_t i = 0; i < results.size(); ++i) {
    const Tensor gradient = program[bucket.gradient(i)];
    Tensor& result = program[results[i]];
    Shape shape = gradient.shape;
    Layout layout = gradient.layout;
    if (bucket.shares()) {
      layout.push_back(share_of_rows(gradient, bucket.axis()));
      shape[0] = share_of(shape[0], 0, bucket.mesh().size(bucket.axis())).count();
    }
    if (result.shape != shape || result.dtype != gradient.dtype)
      throw Error(name + " made " + std::string(name_of(result.dtype)) + text(result.shape) + " of the gradient of " +
                      bucket.parameter(i) + ", but " + std::string(name_of(gradient.dtype)) + text(shape) +
                      " is wanted.",
                  ExitCode::failed);
    result.layout = layout;
  }
  return results;
}

}  // namespace strata
