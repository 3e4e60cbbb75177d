// See job.h.
#include "engine/runtime/job.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/planning/agreement.h"
#include "engine/planning/dependencies.h"

namespace strata {
namespace {

void require_agreement_of(const std::vector<RunPlans>& stages, size_t program, const Mesh& mesh) {
  std::vector<RankExchanges> ranks;
  for (const RunPlans& plans : stages) {
    const PlannedProgram& planned = plans.programs.at(program);
    const Waits waits = plan_waits(planned.program(), planned.memory);
    ranks.push_back(
        {one_rank_each(mesh, int(ranks.size())), exchanges_of(planned.program(), waits, [](Stream) { return false; })});
  }
  require_agreement(ranks);
}

void predict_together(std::vector<RunPlans>& stages, size_t program, const Mesh& mesh) {
  std::vector<TimedProgram> all;
  for (const RunPlans& plans : stages) {
    const PlannedProgram& planned = plans.programs.at(program);
    if (!planned.prediction) return;
    all.push_back(timed(planned.program(), planned.memory, planned.rates));
  }
  const Timeline timeline = run_together(all, mesh);
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
    const Timeline timeline = run_together(all, mesh);
    for (int program = 0; p == 0 && program < count; ++program) {
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
    require_agreement_of(stages, p, session.mesh);
    predict_together(stages, p, session.mesh);
  }
  return stages;
}

}  // namespace strata
