// Products of a few rows with a matrix, as generation makes them: bound by reading the matrix, once for all rows. Any
// other product is gemm.h's.
#pragma once
#include <cstdint>

#include "strata/threads.h"

namespace strata {

inline constexpr int64_t kThinRows = 4;  // at most

// C (m, n) = A (m, k) Bᵀ + beta·C with B (n, k), rows without gaps. What an element is does not depend on the team.
void thin_product(Threads& threads, int64_t m, int64_t n, int64_t k, const float* A, const float* B, float beta,
                  float* C);

}  // namespace strata
