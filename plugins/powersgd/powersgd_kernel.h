// The arithmetic of PowerSGD (Vogels, Karimireddy and Jaggi, arXiv 1905.13727, algorithms 1 and 2) on one rank. What is
// summed over the ranks between its parts is the exchange's matter. All matrices are f32, row-major; factors are stored
// with a column of the paper's in a row of ours: left and basis (rank, rows), right and query (rank, columns).
#pragma once
#include <cstdint>

#include "strata/tensor.h"
#include "strata/threads.h"

namespace strata::powersgd {

struct Sizes {
  int64_t rows, columns, rank;
};

// matrix += gradient, left(k, i) = matrix row i · query row k. `gradient` is f32, bf16 or f16.
void project(Threads& threads, const Sizes& sizes, DType dtype, const void* gradient, const float* query, float* matrix,
             float* left);
// Rows of left, summed over the ranks, become orthonormal, or 0 where one depends on those before it: the modified
// Gram-Schmidt process, each projection taken twice, dot products in f64.
void orthonormalize(const Sizes& sizes, float* left);
// right(k, j) = sum over i of basis(k, i) · matrix(i, j).
void project_back(Threads& threads, const Sizes& sizes, const float* basis, const float* matrix, float* right);
// The sum's approximation, basis^T right, in rows [first, first + count) of all to `result`, in its type; and its mean
// over `ranks` taken out of matrix, of which the error is left. The next query is right, but for rows that are 0.
void finish(Threads& threads, const Sizes& sizes, int64_t ranks, const float* basis, const float* right, float* matrix,
            float* query, int64_t first, int64_t count, DType dtype, void* result);

}  // namespace strata::powersgd
