// Plans to something that runs; see assembly.h.
#include "engine/runtime/assembly.h"

#include <algorithm>
#include <vector>

#include "engine/planning/localize.h"
#include "engine/runtime/ranks.h"

namespace strata {
namespace {

void make_own(PlannedProgram& planned, const Session& session, const World& world, Goal goal) {
  Program& program = planned.built.program;
  program.storage_directory = rank_directory(program.storage_directory, world);
  localize(program, session.mesh, session.batch(goal).microbatches);
}

int64_t free_bytes(Device* device, int64_t budget) {
  if (!device) return 0;
  const int64_t free = device->free_bytes();
  if (budget > free)
    throw Error("device.memory = " + bytes_text(budget) + ", but " + device->describe() + " has " + bytes_text(free) +
                " free; lower it.");
  return free;
}

std::vector<const Program*> programs_of(const RunPlans& plans) {
  std::vector<const Program*> programs{&plans.main.program()};
  if (plans.validation) programs.push_back(&plans.validation->program());
  return programs;
}

std::vector<const MemoryPlan*> plans_beside(const RunPlans& plans) {
  if (!plans.validation) return {};
  return {&plans.validation->memory};
}

}  // namespace

RunPlans plan_run(const Session& session, Goal goal) {
  RunPlans plans{.main = session.plan(goal), .validation = {}};
  if (goal == Goal::train && !session.data.validation.empty())
    plans.validation = session.plan(Goal::evaluate, &plans.main);
  return plans;
}

void make_own(RunPlans& plans, const Session& session, const World& world, Goal goal) {
  make_own(plans.main, session, world, goal);
  if (plans.validation) make_own(*plans.validation, session, world, Goal::evaluate);
}

Assembly::Assembly(const Session& session, World& world, RunPlans own, Device* shared)
    : own_device_(shared ? nullptr
                         : open_device(session.device.backend, int(session.device.index), world.local_rank())),
      plans(std::move(own)),
      threads(session.threads(), session.cut()),
      device(shared ? shared : own_device_.get()),
      free_before(free_bytes(device, session.device.memory.count)),
      storage(program(), plans.main.memory, plans_beside(plans), session.storage_faults, device),
      groups(make_groups(world, session.mesh, device, session.network, session.run.reproducible, programs_of(plans))),
      executor(program(), plans.main.memory, storage, session.device.backend, threads,
               std::max(1, int(session.host.threads)), &groups, patience(session.network.timeout)) {
  require_same_exchanges(world, session.mesh, executor.exchanges());
  if (!session.device.graphs) executor.without_graphs();
}

}  // namespace strata
