// Matrix products through dnnl_sgemm; see gemm.h.
// Measured on two Zen 5 cores (FMA peak 503 GFLOP/s) at GPT-2 124M's shapes: dnnl_sgemm on a slice a thread gives 450
// to 490 GFLOP/s in every form; oneDNN 2.6's matmul primitive 283 to 499, as its brgemm path is slow for dy·w.
#include "engine/ops/gemm.h"

#include <dnnl.h>

#include <string>

#include "strata/error.h"

namespace strata {

void gemm(Transpose a, Transpose b, int64_t m, int64_t n, int64_t k, const float* A, int64_t lda, const float* B,
          int64_t ldb, float beta, float* C, int64_t ldc) {
  const auto letter = [](Transpose t) { return t == Transpose::yes ? 'T' : 'N'; };
  const dnnl_status_t status = dnnl_sgemm(letter(a), letter(b), m, n, k, 1.0f, A, lda, B, ldb, beta, C, ldc);
  if (status != dnnl_success)
    throw Error("oneDNN's sgemm failed with status " + std::to_string(int(status)) + " (" + std::to_string(m) + " x " +
                    std::to_string(n) + " x " + std::to_string(k) + ").",
                ExitCode::failed);
}

void gemm(Threads& threads, Transpose a, Transpose b, int64_t m, int64_t n, int64_t k, const float* A, int64_t lda,
          const float* B, int64_t ldb, float beta, float* C, int64_t ldc) {
  constexpr int64_t kBlock = 16;  // columns of one vector; a slice's border never cuts one
  if (n >= m)
    threads.split(n, kBlock, [&](int64_t i, int64_t e) {
      gemm(a, b, m, e - i, k, A, lda, B + (b == Transpose::yes ? i * ldb : i), ldb, beta, C + i, ldc);
    });
  else
    threads.split(m, kBlock, [&](int64_t i, int64_t e) {
      gemm(a, b, e - i, n, k, A + (a == Transpose::yes ? i : i * lda), lda, B, ldb, beta, C + i * ldc, ldc);
    });
}

}  // namespace strata
