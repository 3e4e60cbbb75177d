// Balancing without a loss (Wang et al., arXiv 2408.15664): what is added to an expert's probability when experts are
// chosen grows by a fixed step after each update where the expert had less than the mean load, and shrinks where more.
#pragma once
#include "strata/stages.h"

namespace strata::moe {

void register_bias_kinds();

// Emits the update of each bias that an op "route" reads, from the choices of all microbatches and ranks.
void update_biases(UpdateStage& stage, double rate);

}  // namespace strata::moe
