// Which ops of a planned step run a second time where updates made ahead were wrong (updates_ahead.h): its passes
// ahead, and whatever moves tensors for them. They are put into the plan last, so that no other pass of planning knows
// of them.
#pragma once
#include <vector>

#include "strata/program.h"

namespace strata {

// By op, whether it does; and `at`: before which op. Where there are none, the list is empty.
struct RepeatedOps {
  std::vector<char> is{};
  size_t at = 0;
};
RepeatedOps repeated_ops(const Program& program);

struct MemoryPlan;
// Puts those ops into the program a second time, as ops that run where Program::again_if says so, in the memory that
// they have.
void add_repeats(Program& program, MemoryPlan& plan);

}  // namespace strata
