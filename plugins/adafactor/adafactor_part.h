// Adafactor for a matrix whose rows are split over ranks: the same update in three ops, with sums over the ranks
// between.
#pragma once
#include "strata/stages.h"

namespace strata::adafactor {

void register_part_kinds();

// `inputs` and `attributes` are those of the kind "adafactor" for a factored parameter.
void update_part(UpdateStage& stage, const Gradient& gradient, const std::vector<TensorId>& inputs,
                 Attributes attributes);

}  // namespace strata::adafactor
