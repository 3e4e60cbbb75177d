// 8-bit AdamW for a vector, or for rows of a matrix, of which ranks hold parts: blocks, and so the bits, are those of
// the whole vector or row. Two ops with the largest moments of each block taken over the ranks between.
#pragma once
#include "strata/optimizer.h"

namespace strata::adamw8bit {

void register_part_kinds();

// `states` of a part: m and v and the scales of each, those whole on every rank, in the order of the kind "adamw_8bit".
struct VectorPart {
  Gradient gradient;
  std::vector<TensorId> states;
};
// All of a model together, since each is small: their largest moments are one exchange.
void update_vectors(UpdateStage& stage, const std::vector<VectorPart>& vectors, const Attributes& attributes);
// A matrix of which ranks have other columns.
void update_columns(UpdateStage& stage, const Gradient& gradient, const std::vector<TensorId>& states,
                    Attributes attributes);

}  // namespace strata::adamw8bit
