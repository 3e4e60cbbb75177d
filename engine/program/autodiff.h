// Reverse-mode differentiation of a program by its kinds' gradient rules. Every tensor stays written once: sums of
// contributions are new tensors, and the planner decides which of them share memory.
#pragma once
#include <vector>

#include "strata/program.h"

namespace strata {

// Where the walk starts: a tensor and its gradient. Without a gradient the tensor is a loss (gradient 1).
struct Root {
  TensorId tensor;
  TensorId gradient;
};

// Appends the backward ops (stage backward, block and microbatch of the op they differentiate) and returns the
// gradient of each wanted tensor, invalid where no root depends on it. Throws Error when a kind on the way has no
// gradient rule.
std::vector<TensorId> differentiate(Program& program, const std::vector<Root>& roots,
                                    const std::vector<TensorId>& wanted);

}  // namespace strata
