// Unrolls the program of one microbatch over all microbatches of a step: gradient accumulation.
// The order of passes comes from the `schedule` stage; nothing is decided here.
#pragma once
#include <vector>

#include "strata/stages.h"

namespace strata {

// `single` holds forward and backward ops of one microbatch; gradients[i] is the gradient of parameters[i] in it.
// Returns the step's forward and backward ops. Persistent tensors and scalars are shared, everything else exists once
// a microbatch ("name@3"). On return gradients[i] is the gradient summed over the microbatches in the order given.
// `balanced`: summed in a balanced tree over the microbatches instead, ((0 + 1) + (2 + 3)) + …, by additions of their
// own. Throws Error when `order` is not each pass of each microbatch once, forward before backward.
Program unroll(const Program& single, const std::vector<TensorId>& parameters, std::vector<TensorId>& gradients,
               const ScheduleStage& schedule, bool balanced = false);

// Moves ops up to where their inputs are final, keeping their order otherwise: an update runs as soon as its gradient
// is complete, so that the gradient's memory is free again. Those from `first` on, or those marked.
void hoist(Program& program, size_t first);
void hoist(Program& program, const std::vector<char>& movable);

}  // namespace strata
