// Plans to something that runs; see assembly.h.
#include "engine/runtime/assembly.h"

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

#include "engine/planning/localize.h"
#include "engine/runtime/ranks.h"

namespace strata {
namespace {

int64_t free_bytes(Device* device, int64_t budget) {
  if (!device) return 0;
  const int64_t free = device->free_bytes();
  if (budget > free)
    throw Error("device.memory = " + bytes_text(budget) + ", but " + device->describe() + " has " + bytes_text(free) +
                " free; lower it.");
  return free;
}

std::vector<const Program*> programs_of(const RunPlans& plans) {
  std::vector<const Program*> programs;
  for (const PlannedProgram& planned : plans.programs) programs.push_back(&planned.program());
  return programs;
}

int64_t shared_bytes(const RunPlans& plans) {
  int64_t bytes = 0;
  for (const TierPlan& tier : plans.main().memory.tiers) bytes += tier.shared_bytes;
  return bytes;
}

// The memory that this rank has together with others of its host; -1: there is none.
int shared_file(const RunPlans& plans, const Session& session, World& world) {
  for (const Tensor& tensor : plans.main().program().tensors)
    if (const std::string& axis = tensor.lasting->one_memory_over; tensor.persistent && !axis.empty())
      return world.shared_file("parameters", session.mesh[axis].members, shared_bytes(plans));
  return -1;
}

std::vector<const MemoryPlan*> memory_of(const RunPlans& plans) {
  std::vector<const MemoryPlan*> memory;
  for (const PlannedProgram& planned : plans.programs) memory.push_back(&planned.memory);
  return memory;
}

}  // namespace

void make_own(RunPlans& plans, const Session& session, const World& world) {
  for (PlannedProgram& planned : plans.programs) {
    Program& program = planned.built.program;
    for (std::string& directory : program.storage_directories) directory = rank_directory(directory, world);
    localize(program, session.mesh, session.batch(planned.goal).microbatches);
  }
}

namespace {

// As rank `rank` would: a folder of its own is made for the look where there is none.
void look_at_storage_of(int rank, bool alone, const RunPlans& plans) {
  namespace fs = std::filesystem;
  std::vector<std::string> directories = plans.main().program().storage_directories, made;
  for (std::string& directory : directories) {
    if (alone || !fs::is_directory(directory)) continue;  // the store says what is wrong with it
    directory = rank_directory_name(directory, rank);
    if (!fs::is_directory(directory)) made.push_back(directory);
  }
  const auto remove = [&] {
    std::error_code gone;
    for (const std::string& directory : made) fs::remove(directory, gone);
  };
  try {
    for (const std::string& directory : made) make_rank_directory(directory);
    Storage::look(directories, plans.main().memory, memory_of(plans));
  } catch (...) {
    remove();
    throw;
  }
  remove();
}

}  // namespace

void look_at_storage(const std::vector<RunPlans>& stages, const Mesh& mesh) {
  for (size_t stage = 0; stage < stages.size(); ++stage)  // the first rank of each
    look_at_storage_of(mesh.planner(int(stage)).rank(), mesh.size() == 1, stages[stage]);
  if (mesh.size() == 1) return;
  for (int rank = 0; rank < mesh.size(); ++rank) {  // those that another run may be using, few of a large job
    const std::vector<std::string>& directories = stages[0].main().program().storage_directories;
    if (std::none_of(directories.begin(), directories.end(), [&](const std::string& directory) {
          return std::filesystem::is_directory(rank_directory_name(directory, rank));
        }))
      continue;
    const Mesh own(rank, mesh.sizes());
    look_at_storage_of(rank, false, stages[size_t(own.programs().coordinate)]);
  }
}

Assembly::Assembly(const Session& session, World& world, RunPlans own, Device* shared)
    : own_device_(shared ? nullptr
                         : open_device(session.device.backend, int(session.device.index), world.local_rank())),
      plans(std::move(own)),
      threads(session.threads(), session.cut()),
      device(shared ? shared : own_device_.get()),
      free_before(free_bytes(device, session.device.memory.count)),
      storage(program(), plans.main().memory, memory_of(plans), session.storage_faults, device,
              shared_file(plans, session, world)),
      groups(make_groups(world, session.mesh, device, session.network, session.run.reproducible, programs_of(plans))),
      executors(bind_all(session)) {
  for (const auto& executor : executors) {
    require_same_exchanges(world, session.mesh, executor->exchanges());
    if (!session.device.graphs) executor->without_graphs();
  }
}

bool Assembly::shares_memory() const { return shared_bytes(plans) > 0; }

std::vector<std::unique_ptr<Executor>> Assembly::bind_all(const Session& session) {
  std::vector<std::unique_ptr<Executor>> all;
  for (const PlannedProgram& planned : plans.programs)
    all.push_back(std::make_unique<Executor>(planned.program(), planned.memory, storage, session.device.backend,
                                             threads, std::max(1, int(session.host.threads)), &groups,
                                             patience(session.network.timeout)));
  return all;
}

}  // namespace strata
