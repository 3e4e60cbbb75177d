// See job.h.
#include "engine/runtime/job.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/planning/agreement.h"
#include "engine/planning/dependencies.h"

namespace strata {
namespace {

// When the ops of a step run. Steps that leave passes to the next follow each other closely.
Timeline timeline_of(std::span<const TimedProgram> programs, const Mesh& mesh, bool goes_on) {
  return goes_on ? run_on_and_on(programs, mesh) : run_together(programs, mesh);
}

// Whether a program is of steps in the middle of a run in which stages leave passes to the next step.
bool goes_on(const PlannedProgram& planned) { return !planned.built.left.empty() && !planned.phases.has_first_step(); }

// A program of all stages: what they exchange is checked against each other, and where they are predicted they run on
// one clock.
void check_together(std::vector<RunPlans>& stages, size_t program, const Mesh& mesh) {
  std::vector<RankExchanges> ranks;
  std::vector<TimedProgram> all;  // those that are predicted
  for (const RunPlans& plans : stages) {
    const PlannedProgram& planned = plans.programs.at(program);
    if (planned.prediction) all.push_back(timed(planned.program(), planned.memory, planned.rates));
    const Waits waits = planned.prediction ? all.back().waits : plan_waits(planned.program(), planned.memory);
    ranks.push_back(
        {one_rank_each(mesh, int(ranks.size())), exchanges_of(planned.program(), waits, [](Stream) { return false; })});
  }
  require_agreement(ranks);
  ranks.clear();
  if (all.size() < stages.size()) return;
  Timeline timeline = timeline_of(all, mesh, goes_on(stages[0].programs[program]));
  for (size_t s = 0; s < stages.size(); ++s) {
    PlannedProgram& planned = stages[s].programs[program];
    planned.prediction = prediction_of(planned.program(), all[s], planned.rates, timeline, s);
  }
}

}  // namespace

std::optional<double> predict_with_others(World& world, const Mesh& mesh, RunPlans& plans) {
  const int count = mesh.programs().size;
  if (count == 1) return {};
  double busiest = 0;
  for (size_t p = 0; p < plans.phases.programs(); ++p) {
    PlannedProgram& planned = plans.programs[p];
    const bool speaks = world.rank() == mesh.planner().rank();  // for all that have this program
    const std::vector<std::string> texts =
        world.gather_to_zero(speaks ? text_of(timed(planned.program(), planned.memory, planned.rates)) : "");
    if (world.rank() != 0) continue;
    std::vector<TimedProgram> all;
    for (int program = 0; program < count; ++program)
      all.push_back(timed_from(texts.at(size_t(mesh.planner(program).rank()))));
    Timeline timeline = timeline_of(all, mesh, goes_on(planned));
    for (int program = 0; p == plans.usual() && program < count; ++program) {
      double busy = 0;
      for (size_t i = 0; i < all[size_t(program)].ops.size(); ++i)
        if (all[size_t(program)][i].stream == Stream::compute)
          busy +=
              timeline.programs[size_t(program)].spans[i].finish - timeline.programs[size_t(program)].spans[i].start;
      busiest = std::max(busiest, busy);
    }
    planned.prediction = prediction_of(planned.program(), all[0], planned.rates, timeline, 0);
  }
  return world.rank() == 0 ? std::optional(busiest) : std::nullopt;
}

std::vector<RunPlans> plan_stages(Session& session) {
  std::vector<RunPlans> stages;
  const int count = session.mesh.programs().size;
  for (int stage = 0; stage < count; ++stage) {
    session.mesh = session.mesh.planner(stage);
    try {
      stages.push_back(session.plan_run());
    } catch (const Error& error) {
      if (count == 1) throw;
      throw Error(fmt::format("stage {} of the pipeline: {}", stage, error.what()), error.code());
    }
  }
  for (size_t p = 0; count > 1 && p < stages[0].programs.size(); ++p) {
    check_together(stages, p, session.mesh);
  }
  return stages;
}

}  // namespace strata
