// Drops what nothing uses from a forward program: how a plugin that erases ops gets rid of what only they needed.
#pragma once
#include <vector>

#include "strata/program.h"

namespace strata {

// Drops ops whose results nothing reads, all parameters that no op uses, and of the first `declared` tensors states and
// data that none uses. Kept are `wanted` tensors, losses and other step outputs, what updates a persistent tensor, and
// ops that send or receive. Ids of tensors stay.
void drop_unused(Program& program, const std::vector<TensorId>& wanted, size_t declared);

}  // namespace strata
