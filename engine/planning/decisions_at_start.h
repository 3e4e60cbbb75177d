// What rests where without being asked to by a budget: forms that plugins want always, and moves of what lives
// elsewhere. The residency planner (residency.h) begins with these decisions, and relief.h adds to them.
#pragma once
#include <vector>

#include "engine/planning/homes.h"
#include "engine/planning/materialize.h"

namespace strata {

// Where a program uses its tensors.
struct Uses {
  std::vector<std::vector<int32_t>> of;  // by tensor: ops, ascending; parts count for their whole
  std::vector<int32_t> visit;            // by op: counts stretches of one block, microbatch and pass
  explicit Uses(const Program& program);
};

// Bytes that a tensor's resting form keeps.
int64_t kept_bytes(const Program& program, int32_t tensor, int form);

Decisions decisions_at_start(const Program& program, const Uses& uses, const Homes& homes);

}  // namespace strata
