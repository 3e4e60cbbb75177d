// Unrolls the program of one microbatch over all microbatches of a step: gradient accumulation. Passes of microbatches
// that began in the step before read what that step put into persistent tensors for them.
// The order of passes comes from the `schedule` stage; nothing is decided here.
#pragma once
#include <string_view>
#include <vector>

#include "engine/planning/passes.h"

namespace strata {

// In the names of persistent tensors in which a step keeps something for the next one: "block.0.mlp.x.kept.3" of
// microbatch 3, "block.0.mlp.up.weight.kept", "block.0.mlp.up.weight.gradient.kept.0": the sum from microbatch 0 on.
inline constexpr std::string_view kKept = ".kept";

// `single` holds forward and backward ops of one microbatch; gradients[i] is the gradient of parameters[i] in it.
// Returns the step's forward and backward ops. Persistent tensors and scalars are shared, everything else exists once
// a microbatch ("name@3"). On return gradients[i] is the gradient summed over the microbatches, in the order in which
// the passes make it. `balanced`: summed in a balanced tree over the microbatches instead, ((0 + 1) + (2 + 3)) + …, by
// additions of their own, whatever the order. Where a gradient is what an op with attribute `after_sum` makes of one
// tensor, that tensor is summed, and the op runs once, on the sum. A gradient that no pass of this step makes is
// invalid on return. `mesh`: whose ranks have other microbatches. Throws Error when the order is none
// (PassTable::check), and for what cannot be kept for the next step.
Program unroll(const Program& single, const PassTable& passes, const std::vector<TensorId>& parameters,
               std::vector<TensorId>& gradients, const ScheduleStage& schedule, bool balanced = false,
               const Mesh& mesh = {});

}  // namespace strata
