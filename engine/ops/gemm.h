// Matrix products on the CPU: oneDNN's, one slice of the result a thread. Row-major, f32.
#pragma once
#include <cstdint>

#include "strata/threads.h"

namespace strata {

enum class Transpose : bool { no, yes };

// C (m, n) = op(A) op(B) + beta·C on the calling thread; op(A) is (m, k), op(B) (k, n); lda, ldb, ldc are row strides
// of the matrices as stored.
void gemm(Transpose a, Transpose b, int64_t m, int64_t n, int64_t k, const float* A, int64_t lda, const float* B,
          int64_t ldb, float beta, float* C, int64_t ldc);

// The same with the larger dimension of C split over the team.
void gemm(Threads& threads, Transpose a, Transpose b, int64_t m, int64_t n, int64_t k, const float* A, int64_t lda,
          const float* B, int64_t ldb, float beta, float* C, int64_t ldc);

}  // namespace strata
