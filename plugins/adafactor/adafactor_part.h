// Adafactor for what is split over ranks: the same update in three ops for a matrix, four where ranks have other
// columns of a row, and two for a vector, with sums over the ranks between. Reproducible runs do all tensors so, on any
// number of ranks: with the attribute "exact" the sums are exact (strata/exact_sum.h), so that it does not matter which
// rank has which rows.
#pragma once
#include "plugins/adafactor/adafactor_kernel.h"
#include "strata/optimizer.h"

namespace strata::adafactor {

void register_part_kinds();

// Lasting::fused as an attribute: "128 64 64"; none: the attribute is left out.
std::string text_of(const std::vector<int64_t>& fused);
std::vector<int64_t> fused_of(const Attributes& attributes);

// What an op of any of the kinds has been told, and what the step adds.
Settings settings_of(const Attributes& attributes, const UpdateScalars& scalars);

// `states` (m, rows and columns) and `attributes` are those of the kind "adafactor" for a factored parameter.
void update_part(UpdateStage& stage, const Gradient& gradient, const std::vector<TensorId>& states,
                 Attributes attributes);

// A vector to update: its states are m and v.
struct VectorPart {
  Gradient gradient;
  std::vector<TensorId> states;
  Attributes attributes;
};
// All of a model together, since each is small: their sums are one exchange.
void update_vectors(UpdateStage& stage, const std::vector<VectorPart>& vectors);

}  // namespace strata::adafactor
