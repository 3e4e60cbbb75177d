// What a run stands on, put together in one order: plans made this rank's own, its threads, device, memory, groups of
// ranks and executor. `strata train`, measurements and tests all assemble runs here; what is done with one is theirs.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/world.h"
#include "engine/runtime/executor.h"
#include "engine/runtime/session.h"
#include "engine/runtime/storage.h"

namespace strata {

// Shapes, places and folders of all programs become those of this rank.
void make_own(RunPlans& plans, const Session& session, const World& world);

// Throws what ranks on this host would throw of the directories of the NVMe tier if they began now: as `check` asks.
// `stages` as plan_stages gives them. Leaves nothing behind.
void look_at_storage(const std::vector<RunPlans>& stages, const Mesh& mesh);

class Assembly {
  std::unique_ptr<Device> own_device_;  // first, so that it outlives what uses it
  std::vector<std::unique_ptr<Executor>> bind_all(const Session& session);

 public:
  // `plans` are this rank's own already; `session` and `world` must outlive this. `shared`: a device to use that
  // somebody else has opened; null: the session's backend opens its own, if it has devices. Persistent tensors have no
  // values yet. Throws Error where the device has less memory free than the session's budget, and on all ranks where
  // what they exchange does not fit together.
  Assembly(const Session& session, World& world, RunPlans plans, Device* shared = nullptr);
  Assembly(const Assembly&) = delete;

  const Program& program() const { return plans.main().program(); }
  bool shares_memory() const;  // of persistent tensors, with other ranks (Lasting::one_memory_over)
  Executor& executor_of(size_t program) const { return *executors.at(program); }

  const RunPlans plans;
  Threads threads;
  Device* const device;       // null: the host itself
  const int64_t free_before;  // bytes of the device, before anything is allocated there; 0 without one
  Storage storage;
  const Groups groups;                                     // none for a world of one
  const std::vector<std::unique_ptr<Executor>> executors;  // by program of the plans; one runs at a time
};

}  // namespace strata
