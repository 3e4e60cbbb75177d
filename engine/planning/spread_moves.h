// Places moves between tiers in the program's order so that they hide behind compute: what comes back starts as late as
// it can and still be in time, what leaves keeps its memory until it is predicted to be gone. An op's place in the
// order decides when its memory is taken or free; its stream starts it as soon as its inputs are there.
#pragma once
#include <array>
#include <cstdint>

#include "engine/planning/memory_plan.h"
#include "engine/planning/rates.h"

namespace strata {

// Reorders moves only, within dependencies. `limits` are live bytes by tier that no place may exceed (0: no limit).
// Whether one of them stood in the way.
bool spread_moves(Program& program, const MemoryPlan& plan, const Rates& rates,
                  const std::array<int64_t, kTiers>& limits);

}  // namespace strata
