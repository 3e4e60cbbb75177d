// Gives every tensor of a program its place in one arena per tier, by liveness, before anything is allocated.
// Pure planning: no storage here.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "strata/op_kind.h"

namespace strata {

inline constexpr int64_t kAlignment = 64;  // bytes; a cache line and the widest vector

// Bytes by category (Role).
using Ledger = std::array<int64_t, kRoles>;

// A piece of memory shared by tensors that never live at once, or the workspace of one op.
struct Buffer {
  std::string name;  // of its first tensor
  Role role = Role::activation;
  int64_t bytes = 0;
  int64_t offset = -1;  // in the transient region
  int32_t first = 0;    // op that writes it first; 0 for data, which is there before the step
  int32_t last = 0;     // op that uses it last
};

struct MemoryPlan {
  int64_t persistent_bytes = 0;            // region at the start of the arena: parameters, states, scalars
  int64_t transient_bytes = 0;             // region after it, shared over time
  int64_t live_peak_bytes = 0;             // most transient bytes alive at once: transient_bytes can't be less
  int32_t peak_op = -1;                    // where that is
  Ledger at_peak{};                        // by category at that op, persistent tensors included
  std::vector<int64_t> persistent_offset;  // by tensor; -1 for transient tensors
  std::vector<int32_t> buffer_of;          // by tensor; -1 for persistent tensors
  std::vector<int32_t> workspace_of;       // by op: its workspace's buffer or -1
  std::vector<Buffer> buffers;
  int64_t total_bytes() const { return persistent_bytes + transient_bytes; }
};

// `threads` and `backend` decide the kernels' workspaces. Throws Error when a kind lacks a kernel for the backend.
MemoryPlan plan_memory(const Program& program, const std::string& backend, int threads);

// Live transient bytes by category at every op: the memory timeline.
std::vector<Ledger> timeline(const Program& program, const MemoryPlan& plan);

// Throws Error when the plan needs more than `budget` bytes (0: no limit): says by how much, what is largest at the
// peak, and what would help.
void enforce_budget(const Program& program, const MemoryPlan& plan, int64_t budget, const std::string& advice);

}  // namespace strata
