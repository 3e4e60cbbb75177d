// One step with what belongs around its ops: the program that is the step's, its scalars and the hooks of plugins.
// `strata train`, measurements and tests run their steps here; data, checkpoints and logs are theirs.
#pragma once
#include <cstdint>
#include <functional>
#include <string_view>

#include "engine/runtime/assembly.h"
#include "engine/runtime/log.h"

namespace strata {

// How a step is run: to its end; as one of a loop, so that what is left of it may go on behind the next
// (Executor::run); with released memory overwritten (Executor::run_poisoned).
enum class StepMode { whole, in_loop, poisoned };

class StepRunner final : public StepContext {
 public:
  // Both must outlive it.
  StepRunner(const Session& session, Assembly& assembly) : session_(session), assembly_(assembly) {}

  // Runs step `step` (1 is the first of a run): `load` gives the program its data, `publish` takes what the step made.
  // Throws what an op threw, NonFinite among it, and what a plugin's hook threw with its name.
  void run(int64_t step, const std::function<void()>& load, const std::function<void()>& publish = {},
           StepMode mode = StepMode::whole);
  // Nothing is left of the last step afterwards: before anybody but the next step looks at tensors.
  void drain() { executor().drain(); }
  // What the last step left is done afterwards, where updates are made ahead (planning/updates_ahead.h): before anybody
  // but the next step looks at parameters and states. Nothing where nothing is left; throws as run does.
  void settle();
  // What plugins logged in the last step that is of the one before, where updates are made ahead; after settle(), of
  // the last step.
  const StepLog::Fields& logged_late() const { return logged_late_; }
  bool is_late(std::string_view output) const;               // a step output that is of the step before
  const StepLog::Fields& logged() const { return logged_; }  // by plugins in the last step
  size_t program() const { return program_; }                // of the plans, that ran or is running; at first the first
  Executor& executor() const { return assembly_.executor_of(program_); }

  int64_t step() const override { return step_; }
  int64_t steps() const override { return session_.run.steps; }
  double scalar(std::string_view name) const override;
  void set_scalar(std::string_view name, double value) override { assembly_.storage.set_scalar(name, value); }
  void log(std::string_view name, double value) override;

 private:
  void at_part(StepPart part, bool start);
  void each_plugin(std::string_view hook, const std::function<void(Plugin&)>& call);

  const Session& session_;
  Assembly& assembly_;
  StepLog::Fields logged_, logged_late_;
  mutable std::string late_read_;                             // the last late output that the plugin has read
  std::vector<std::pair<std::string, std::string>> of_late_;  // names in the log, and of which output
  bool unsettled_ = false;
  int64_t step_ = 0;
  size_t program_ = 0;
};

}  // namespace strata
