// Which ops of other streams an op has to wait for, so that streams need no guessing at run time.
// Follows bytes, not tensors, so reuse of memory across streams is covered like any other conflict.
#pragma once
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "engine/planning/memory_plan.h"

namespace strata {

// "Stream s must have finished its first `count` ops."
struct Wait {
  Stream stream;
  int32_t count;
};

// A range of bytes that an op reads or writes. The arenas of all tiers lie on one line, far apart.
struct Access {
  int64_t begin = 0, end = 0;
  bool write = false;
};

// waits[i]: for op i, what is not already implied by the order of its own stream and by earlier waits.
std::vector<std::vector<Wait>> plan_waits(const Program& program,
                                          const std::function<std::vector<Access>(int32_t op)>& accesses);

// The ranges of an op: its tensors and its workspace, where the plan put them; for the NVMe tier's moves whole blocks.
std::vector<Access> accesses_of(const Program& program, const MemoryPlan& plan, int32_t op);

std::vector<std::vector<Wait>> plan_waits(const Program& program, const MemoryPlan& plan);

}  // namespace strata
