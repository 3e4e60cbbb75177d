// Early placement of ops by what they read: updates, exchanges and sums run as soon as they can.
#pragma once
#include <vector>

#include "strata/program.h"

namespace strata {

// Moves ops up to where their inputs are final, keeping their order otherwise: an update runs as soon as its gradient
// is complete, so that the gradient's memory is free again. Those from `first` on, or those marked.
void hoist(Program& program, size_t first);
void hoist(Program& program, const std::vector<char>& movable);

}  // namespace strata
