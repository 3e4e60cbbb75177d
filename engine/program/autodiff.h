// Reverse-mode differentiation of a program by its kinds' gradient rules. Every tensor stays written once: sums of
// contributions are new tensors, and the planner decides which of them share memory.
#pragma once
#include <utility>
#include <vector>

#include "strata/stages.h"

namespace strata {

struct Differentiated {
  std::vector<TensorId> wanted;       // the gradient of each wanted tensor, invalid where no root depends on it
  std::vector<TensorId> activations;  // gradients of tensors that are no parameters: what flows from op to op
  // Of tensors whose contributions were asked for apart: those beyond the first that was made, in the order of making.
  std::vector<std::pair<TensorId, TensorId>> more{};
};

// Appends the backward ops (stage backward, block and microbatch of the op they differentiate). Throws Error when a
// kind on the way has no gradient rule. What ops contribute to the gradient of a tensor is summed, but for the tensors
// in `apart`.
Differentiated differentiate(Program& program, const std::vector<Root>& roots, const std::vector<TensorId>& wanted,
                             const std::vector<TensorId>& apart = {});

}  // namespace strata
