// The op kind linear_gelu_gradient for backends whose products can't end with GELU's gradient.
#pragma once
#include <string>

#include "strata/op_kind.h"

namespace strata {

// The kernels of linear_input_gradient and gelu_gradient of the backend, one after the other, the second in place.
Launch bind_in_turn(const Binding& binding, const std::string& backend);

}  // namespace strata
