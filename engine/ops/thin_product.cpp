// See thin_product.h. Beside dnnl_sgemm with one row on a Zen 5 core: about 1.3 times its bytes a second.
#include "engine/ops/thin_product.h"

#include "engine/ops/gemm.h"
#include "engine/ops/vector.h"
#include "strata/error.h"

namespace strata {
namespace {

// M rows of A with N rows of B: C[i][j] (+)= their dot product.
template <int M, int N>
STRATA_INLINE void dot_products(int64_t k, const float* a, const float* b, float beta, float* c, int64_t stride) {
  simd::F sums[M][N] = {};
  simd::map(k, [&](int64_t l, int64_t count) STRATA_INLINE_LAMBDA {
    simd::F x[M];
    for (int i = 0; i < M; ++i) x[i] = simd::get(a + i * k + l, count);
    for (int j = 0; j < N; ++j) {
      const simd::F y = simd::get(b + j * k + l, count);
      for (int i = 0; i < M; ++i) sums[i][j] += x[i] * y;
    }
  });
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) {
      float& at = c[i * stride + j];
      at = simd::sum(sums[i][j]) + (beta != 0 ? beta * at : 0);
    }
}

template <int M>
STRATA_INLINE void columns(int64_t first, int64_t end, int64_t k, const float* a, const float* b, float beta, float* c,
                           int64_t stride) {
  int64_t j = first;
  for (; j + 4 <= end; j += 4) dot_products<M, 4>(k, a, b + j * k, beta, c + j, stride);
  for (; j < end; ++j) dot_products<M, 1>(k, a, b + j * k, beta, c + j, stride);
}

STRATA_SIMD void some_columns(int64_t m, int64_t first, int64_t end, int64_t k, const float* a, const float* b,
                              float beta, float* c, int64_t stride) {
  if (m == 1) columns<1>(first, end, k, a, b, beta, c, stride);
  if (m == 2) columns<2>(first, end, k, a, b, beta, c, stride);
  if (m == 3) columns<3>(first, end, k, a, b, beta, c, stride);
  if (m == 4) columns<4>(first, end, k, a, b, beta, c, stride);
}

}  // namespace

void thin_product(Threads& threads, int64_t m, int64_t n, int64_t k, const float* A, const float* B, float beta,
                  float* C) {
  STRATA_CHECK(m <= kThinRows);
  const Cut cut(threads, n);
  cut.each(threads,
           [&](int, int64_t piece) { some_columns(m, cut.begin(piece), cut.end(piece), k, A, B, beta, C, n); });
}

}  // namespace strata
