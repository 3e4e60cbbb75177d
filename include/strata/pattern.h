// Patterns of parameters' names, wherever a configuration has them: `*` stands for any text, also across dots, and
// everything else for itself.
#pragma once
#include <string>
#include <string_view>

#include "strata/program.h"

namespace strata {

bool matches(std::string_view pattern, std::string_view name);

// The name under which the model declared a parameter, also where it is a working copy of mixed precision or a part.
std::string parameter_name(const Program& program, TensorId parameter);

// For messages about a pattern that matches nothing: the first and the last parameter's name, as ", whose parameters
// have names as A and B."; "." where there are none.
std::string names_like(const Program& program);

}  // namespace strata
