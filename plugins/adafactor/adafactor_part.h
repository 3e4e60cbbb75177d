// Adafactor for a matrix whose rows are split over ranks: the same update in three ops, with sums over the ranks
// between. Reproducible runs do all matrices so, on any number of ranks: with the attribute "exact" the sums are exact
// (strata/exact_sum.h), so that it does not matter which rank has which rows.
#pragma once
#include "strata/stages.h"

namespace strata::adafactor {

void register_part_kinds();

// Tensor::fused as an attribute: "128 64 64"; none: the attribute is left out.
std::string text_of(const std::vector<int64_t>& fused);
std::vector<int64_t> fused_of(const Attributes& attributes);

// `inputs` and `attributes` are those of the kind "adafactor" for a factored parameter.
void update_part(UpdateStage& stage, const Gradient& gradient, const std::vector<TensorId>& inputs,
                 Attributes attributes);

}  // namespace strata::adafactor
