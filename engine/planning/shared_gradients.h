// Gradients of one parameter that are made apart become one: those of several ops that read it (reproducible runs sum
// them apart, so that it does not matter which stage of a pipeline has which; others where a plugin asks for it), then
// those of the stages that share it.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "strata/stages.h"

namespace strata {

// By the name under which the model declared a parameter.
using SharedByName = std::map<std::string, SharedParameter>;
SharedByName by_name(const Program& single, const std::vector<SharedParameter>& shared);

// When gradients have been exchanged among the ranks of one program. Those from `first_apart` on are added to the
// others and taken out of the list. Of a shared parameter the first holder gets what the others have, adds it in the
// order of stages, and sends them the sum; it alone counts the gradient.
void join_gradients(GradientStage& stage, size_t first_apart, const SharedByName& shared);

}  // namespace strata
