// The stages of planning in order; see build.h.
#include "engine/planning/build.h"

#include <algorithm>
#include <optional>

#include "engine/planning/gradient_exchange.h"
#include "engine/planning/guarded.h"
#include "engine/planning/hoist.h"
#include "engine/planning/split_program.h"
#include "engine/planning/unroll.h"
#include "engine/plugin/loader.h"
#include "engine/program/autodiff.h"
#include "engine/program/drop_unused.h"
#include "engine/program/op_limit.h"
#include "engine/program/sharding.h"
#include "strata/convert.h"

namespace strata {
namespace {

// How often the program of a step is checked: twice, or after each plugin, which takes as many times as long. The
// program of one microbatch is always checked after each.
enum class Checks { whole, each_plugin };

template <class Call>
void rewrite(std::span<const NamedPlugin> plugins, std::string_view stage, Program& program, const Mesh& mesh,
             Checks checks, Call&& call) {
  for (const NamedPlugin& named : plugins) {
    guarded(named, stage, call);
    if (checks == Checks::each_plugin) verify(program, named.name + "\", stage \"" + std::string(stage), &mesh);
  }
}

// The plugins as they are called around the exchanges of gradients.
struct Order {
  std::vector<NamedPlugin> early{}, rest{};
  explicit Order(std::span<const NamedPlugin> plugins) {
    for (const NamedPlugin& named : plugins) (named.plugin->capabilities().early ? early : rest).push_back(named);
  }
  // Of the rest: those that say whether gradients are finite, and those that may ask.
  std::vector<NamedPlugin> unscaling() const { return chosen(true); }
  std::vector<NamedPlugin> others() const { return chosen(false); }

 private:
  std::vector<NamedPlugin> chosen(bool unscales) const {
    std::vector<NamedPlugin> list;
    for (const NamedPlugin& named : rest) {
      const std::vector<std::string> provides = named.plugin->capabilities().provides;
      const bool does = std::find(provides.begin(), provides.end(), "unscaled_gradients") != provides.end();
      if (does == unscales) list.push_back(named);
    }
    return list;
  }
};

// What a gradient of one microbatch has yet to be summed over: the axes over which its ops left it partial, and those
// that split the batch, but those that split its parameter.
std::vector<std::string> partial_over(const Mesh& mesh, const Layout& layout, const Partial& partial) {
  std::vector<std::string> axes(partial.begin(), partial.end());
  for (std::string_view axis : mesh.parts_of(kDataAxis))
    if (mesh.size(axis) > 1 &&
        std::none_of(layout.begin(), layout.end(), [&](const Split& split) { return split.axis == axis; }))
      axes.emplace_back(axis);
  return axes;
}

// Each gradient as a type of 16 bits: rounded as soon as it is made, and summed over microbatches in that type.
void round_gradients(Program& program, std::vector<Gradient>& list, DType dtype) {
  Builder build(program);
  build.step_part = StepPart::backward;
  build.role = Role::gradient;
  std::vector<int> block(program.tensors.size(), -1);  // of the op that makes a tensor
  for (const Op& op : program.ops)
    for (TensorId id : op.outputs) block[size_t(id.value)] = op.block;
  for (Gradient& gradient : list) {
    build.block_index = block[size_t(gradient.tensor.value)];
    const Layout layout = program[gradient.tensor].layout;
    gradient.tensor =
        build.emit("cast", {gradient.tensor}, {{"dtype", std::string(name_of(dtype))}}, program[gradient.tensor].name);
    program[gradient.tensor].layout = layout;
  }
  hoist(program, program.ops.size() - list.size());
}

// Before anything is made for each microbatch.
void require_room_for_microbatches(const Program& single, int64_t microbatches) {
  require_room_for_ops(double(single.ops.size()) * double(microbatches),
                       "a step of " + std::to_string(microbatches) + " microbatches of " +
                           std::to_string(single.ops.size()) + " ops each",
                       "raise data.micro_batch, or lower data.global_batch or the number of layers.");
}

// The order of the passes as plugins want it. An order that cannot be is the plugin's error.
std::pair<ScheduleStage, PassTable> scheduled(std::span<const NamedPlugin> plugins, Program& single,
                                              const std::vector<TensorId>& activation_gradients, int microbatches,
                                              Goal goal, const Phases& phases) {
  ScheduleStage schedule{.microbatches = microbatches, .blocks = blocks_of(single), .phases = phases};
  schedule.order = default_order(microbatches, 1, goal == Goal::train);
  PassTable passes(single, activation_gradients, schedule.chunks);
  if (goal == Goal::train)
    for (const NamedPlugin& named : plugins)
      guarded(named, "schedule", [&](Plugin& plugin) {
        plugin.schedule(schedule);
        schedule.microbatches = microbatches;
        passes = PassTable(single, activation_gradients, schedule.chunks);
        passes.check(schedule);
      });
  return {std::move(schedule), std::move(passes)};
}

void require_summed(const Mesh& mesh, const std::vector<Gradient>& list, const std::vector<std::string>& plugin_path) {
  const std::vector<std::string_view> of_data = mesh.parts_of(kDataAxis);
  for (const Gradient& gradient : list)
    for (const std::string& axis : gradient.partial) {
      if (std::find(of_data.begin(), of_data.end(), axis) != of_data.end())
        throw Error(
            "mesh.data asks for several ranks, but no enabled plugin sums gradients over them; enable one that does" +
            installed_for("summed_gradients", plugin_path) + ", or set it to 1.");
      throw Error("some gradients are partial sums over axis \"" + axis + "\", and no enabled plugin sums them.");
    }
}

// Ranks that see the same sequences share the work, by splits or by exchanges of their own, or they are there for
// nothing.
void require_used(const Mesh& mesh, const Program& program, const std::vector<NamedSplit>& splits,
                  const std::vector<std::string>& plugin_path) {
  const std::vector<std::string_view> of_data = mesh.parts_of(kDataAxis);
  for (const Axis& axis : mesh.axes()) {
    const bool known = std::find(of_data.begin(), of_data.end(), axis.name) != of_data.end();
    if (axis.size == 1 || known) continue;
    if (std::any_of(splits.begin(), splits.end(), [&](const NamedSplit& split) { return split.axis == axis.name; }))
      continue;
    if (std::any_of(program.ops.begin(), program.ops.end(), [&](const Op& op) {
          return op.kind->exchange && op.attributes.has("axis") && op.attributes.string("axis") == axis.name;
        }))
      continue;
    throw Error("mesh." + axis.name + " asks for " + std::to_string(axis.size) +
                " ranks, but no enabled plugin splits anything over them; enable one that does" +
                installed_for("splits over " + axis.name, plugin_path) + ", or set it to 1.");
  }
}

// Of a pass that is left to the next step.
void require_may_be_left(const ProgramStage& forward, const Mesh& mesh, const std::string& pass) {
  if (forward.loss_gradient)
    throw Error("the " + pass +
                " is left to the next step, in which the loss scale may be another; train without loss "
                "scaling (bf16, f32).");
  const auto of_data = mesh.parts_of(kDataAxis);
  for (const Axis& axis : mesh.axes())
    if (axis.size > 1 && std::find(of_data.begin(), of_data.end(), axis.name) == of_data.end())
      throw Error("the " + pass + " is left to the next step, which cannot be planned yet with ranks along axis \"" +
                  axis.name + "\".");
}

// Of the program of one microbatch.
double flops(const Program& program) {
  double sum = 0;
  for (const Op& op : program.ops) sum += cost_of(OpView(program, op)).flops;
  return sum;
}

// `unrolled` tells, also when this throws, whether there was a program of the step.
BuiltProgram build(std::span<const NamedPlugin> plugins, const BatchShape& batch, Goal goal, const Mesh& mesh,
                   const std::vector<std::string>& plugin_path, const Phases& phases, Checks checks, bool& unrolled) {
  BuiltProgram built;
  Program single;

  ModelStage model(batch, goal, phases);
  for (const NamedPlugin& named : plugins) guarded(named, "model", [&](Plugin& plugin) { plugin.model(model); });
  Builder build(single);
  const TensorId result = model.call("model", build, {});
  built.vocabulary = model.vocabulary();
  if (goal == Goal::logits)
    single[result].step_output = true;
  else
    single.losses = {result};
  verify(single, "model", &mesh);
  const size_t declared = single.tensors.size();

  ProgramStage forward{.program = single, .batch = batch, .goal = goal, .mesh = mesh, .phases = phases};
  rewrite(plugins, "forward", single, mesh, Checks::each_plugin, [&](Plugin& plugin) { plugin.forward(forward); });

  std::vector<TensorId> started = forward.wanted;
  for (const Root& root : forward.roots) started.insert(started.end(), {root.tensor, root.gradient});
  drop_unused(single, started, declared);
  verify(single, "dropping what is unused", &mesh);
  require_used(mesh, single, forward.splits, plugin_path);
  split_program(single, forward.splits, started, mesh);
  verify(single, "splitting over the mesh", &mesh);

  require_room_for_microbatches(single, batch.microbatches);
  const std::vector<TensorId> parameters = single.with_role(Role::parameter);
  std::vector<size_t> number(single.tensors.size());  // of a parameter in that list
  for (size_t i = 0; i < parameters.size(); ++i) number[size_t(parameters[i].value)] = i;
  std::vector<TensorId> gradients(parameters.size());
  const Order order(plugins);
  std::optional<GradientExchanges> exchanges;
  std::vector<Gradient> list;
  std::vector<TensorId> activation_gradients;
  if (goal == Goal::train) {
    std::vector<Root> roots;
    for (TensorId loss : single.losses) roots.push_back({loss, forward.loss_gradient});
    roots.insert(roots.end(), forward.roots.begin(), forward.roots.end());
    std::vector<TensorId> wanted = parameters;
    wanted.insert(wanted.end(), forward.wanted.begin(), forward.wanted.end());
    Differentiated made = differentiate(single, roots, wanted);
    const auto of_others = made.wanted.begin() + int64_t(parameters.size());
    gradients.assign(made.wanted.begin(), of_others);
    activation_gradients = std::move(made.activations);
    verify(single, "differentiation", &mesh);
    const std::vector<Partial> partial = partial_sums(single, "differentiation", &mesh);
    for (size_t i = 0; i < parameters.size(); ++i)
      if (gradients[i]) {
        const Layout& layout = single[parameters[i]].layout;
        single[gradients[i]].layout = layout;
        list.push_back({.parameter = parameters[i],
                        .tensor = gradients[i],
                        .scale = {},
                        .partial = partial_over(mesh, layout, partial[size_t(gradients[i].value)])});
      }
    if (is_half(forward.gradient_dtype)) round_gradients(single, list, forward.gradient_dtype);
    exchanges.emplace(ExchangeStage(single, batch, mesh, list, phases), bool(forward.loss_gradient));
    for (const NamedPlugin& named : plugins) {
      exchanges->turn_of(named.name);
      guarded(named, "exchange", [&](Plugin& plugin) { plugin.exchange(exchanges->stage()); });
    }
    const size_t first = single.ops.size();
    ProgramStage backward{.program = single,
                          .batch = batch,
                          .goal = goal,
                          .mesh = mesh,
                          .phases = phases,
                          .gradients = &list,
                          .wanted = forward.wanted,
                          .wanted_gradients = {of_others, made.wanted.end()}};
    const auto call = [&](Plugin& plugin) { plugin.backward(backward); };
    rewrite(order.early, "backward", single, mesh, Checks::each_plugin, call);
    exchanges->each_microbatch(single, list);
    verify(single, "exchanging gradients of a microbatch", &mesh);
    rewrite(order.rest, "backward", single, mesh, Checks::each_plugin, call);
    hoist(single, std::min(first, single.ops.size()));
    std::fill(gradients.begin(), gradients.end(), TensorId{});
    for (const Gradient& gradient : list) gradients[number[size_t(gradient.parameter.value)]] = gradient.tensor;
  }

  require_room_for_microbatches(single, batch.microbatches);
  const auto [schedule, passes] =
      scheduled(plugins, single, activation_gradients, int(batch.microbatches), goal, phases);
  for (const Pass& pass : passes.left(schedule)) built.left.push_back(text(pass));
  if (!built.left.empty()) require_may_be_left(forward, mesh, built.left.front());
  built.program = unroll(single, passes, parameters, gradients, schedule, batch.reproducible, mesh);
  Program& step = built.program;
  unrolled = true;
  if (checks == Checks::each_plugin) verify(step, "unrolling", &mesh);
  built.model_flops = flops(single) * double(batch.microbatches) * double(goal == Goal::train ? mesh.size() : 1);
  built.tokens_per_step = batch.sequences() * batch.sequence_length;
  if (goal == Goal::logits) built.logits = step.find(single[result].name.of_microbatch(0));

  if (goal == Goal::train) {
    for (Gradient& gradient : list) {
      const size_t i = number[size_t(gradient.parameter.value)];
      gradient.tensor = gradients[i];
      gradient.parameter = step.find(single[parameters[i]].name);
    }
    std::erase_if(list, [](const Gradient& gradient) { return !gradient.tensor; });  // left to the next step
    const size_t first = step.ops.size();
    Builder reduce(step);
    reduce.step_part = StepPart::reduce;
    GradientStage gradient_stage(reduce, list, mesh, phases);
    const auto call = [&](Plugin& plugin) {
      reduce.role = Role::gradient;
      plugin.gradients(gradient_stage);
    };
    rewrite(order.early, "gradients", step, mesh, checks, call);
    exchanges->once(gradient_stage);
    if (checks == Checks::each_plugin) verify(step, "exchanging gradients", &mesh);
    if (exchanges->has_late()) {
      rewrite(order.unscaling(), "gradients", step, mesh, checks, call);
      exchanges->late(gradient_stage);
      if (checks == Checks::each_plugin) verify(step, "exchanging unscaled gradients", &mesh);
      rewrite(order.others(), "gradients", step, mesh, checks, call);
    } else {
      rewrite(order.rest, "gradients", step, mesh, checks, call);
    }
    require_summed(mesh, list, plugin_path);
    Builder update(step);
    update.step_part = StepPart::update;
    UpdateStage update_stage(update, list, mesh, batch.reproducible, phases);
    rewrite(plugins, "update", step, mesh, checks, [&](Plugin& plugin) {
      update.role = Role::workspace;
      plugin.update(update_stage);
    });
    verify(step, "update", &mesh);
    hoist(step, first);
  }

  ProgramStage placement{.program = step, .batch = batch, .goal = goal, .mesh = mesh, .phases = phases};
  rewrite(plugins, "placement", step, mesh, checks, [&](Plugin& plugin) { plugin.placement(placement); });
  verify(step, "placement", &mesh);
  return built;
}

}  // namespace

BuiltProgram build_program(std::span<const NamedPlugin> plugins, const BatchShape& batch, Goal goal, const Mesh& mesh,
                           const std::vector<std::string>& plugin_path, const Phases& phases) {
  bool unrolled = false;
  try {
    return build(plugins, batch, goal, mesh, plugin_path, phases, Checks::whole, unrolled);
  } catch (const std::exception&) {
    if (!unrolled) throw;
  }
  // Somebody broke the program of the step, or fails because somebody did: who was first shows when each is checked.
  return build(plugins, batch, goal, mesh, plugin_path, phases, Checks::each_plugin, unrolled);
}

}  // namespace strata
