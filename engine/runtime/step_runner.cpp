// Scalars, hooks, ops; see step_runner.h.
#include "engine/runtime/step_runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/runtime/feed.h"

namespace strata {

void StepRunner::run(int64_t step, const std::function<void()>& load, const std::function<void()>& publish,
                     StepMode mode) {
  const size_t program = assembly_.plans.of_step(step);
  // Nobody changes what others still load or give first values.
  if (step_ == 0 && assembly_.shares_memory()) assembly_.groups.at("loop")->barrier();
  if (program != program_) drain();
  step_ = step;
  program_ = program;
  logged_.clear();
  logged_late_.clear();
  of_late_.clear();
  unsettled_ = true;
  set_scalar(kStepScalar, double(step));
  set_scalar(kSeedScalar, double(session_.run.seed));
  set_scalar(kLearningRateFactor, 1);
  if (const std::string& apart = assembly_.plans.main().built.apart; !apart.empty())
    set_scalar(kApartScalar, session_.mesh.size(apart));
  set_scalar(kLossWeight, 1);
  each_plugin("step_start", [&](Plugin& plugin) { plugin.step_start(*this); });
  at_part(StepPart::load, true);
  load();
  at_part(StepPart::load, false);
  if (mode == StepMode::poisoned)
    executor().run_poisoned();
  else
    executor().run([&](StepPart part, bool start) { at_part(part, start); }, mode == StepMode::in_loop);
  at_part(StepPart::publish, true);
  if (publish) publish();
  at_part(StepPart::publish, false);
  each_plugin("step_end", [&](Plugin& plugin) { plugin.step_end(*this); });
}

void StepRunner::settle() {
  drain();
  const std::optional<size_t> settling = assembly_.plans.settling();
  if (!std::exchange(unsettled_, false) || !settling) return;
  Executor& executor = assembly_.executor_of(*settling);
  executor.run();
  logged_late_.clear();
  for (const auto& [name, output] : of_late_) {
    const TensorId id = executor.program().find(output);
    logged_late_.emplace_back(name, read_scalar(executor.program(), id, executor.pointer(id)));
  }
}

bool StepRunner::is_late(std::string_view output) const {
  const std::vector<std::string>& late = assembly_.plans.main().built.late;
  return std::find(late.begin(), late.end(), output) != late.end();
}

// What a plugin logs when it has read an output of the step before is of that one.
void StepRunner::log(std::string_view name, double value) {
  if (late_read_.empty()) {
    logged_.emplace_back(name, value);
    return;
  }
  logged_late_.emplace_back(name, value);
  of_late_.emplace_back(name, late_read_);
}

double StepRunner::scalar(std::string_view name) const {
  if (is_late(name)) late_read_ = name;
  const auto found_in = [&](const Program& program) {
    const TensorId id = program.find(name);
    return id && elements(program[id].shape) == 1 ? id : TensorId{};
  };
  const Program& program = executor().program();
  if (const TensorId id = found_in(program)) return read_scalar(program, id, executor().pointer(id));
  for (const PlannedProgram& planned : assembly_.plans.programs)
    if (found_in(planned.program())) return NAN;
  throw Error("no scalar is named \"" + std::string(name) + "\" in this program.");
}

void StepRunner::at_part(StepPart part, bool start) {
  each_plugin(start ? "part_start" : "part_end", [&](Plugin& plugin) {
    if (start)
      plugin.part_start(*this, part);
    else
      plugin.part_end(*this, part);
  });
}

void StepRunner::each_plugin(std::string_view hook, const std::function<void(Plugin&)>& call) {
  for (const NamedPlugin& named : session_.plugins) {
    late_read_.clear();
    try {
      call(*named.plugin);
    } catch (const std::exception& error) {
      throw Error(fmt::format("plugin \"{}\", {}, step {}: {}", named.name, hook, step_, error.what()),
                  ExitCode::failed);
    }
  }
}

}  // namespace strata
