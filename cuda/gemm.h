// Matrix products on the GPU: cuBLASLt's, with bias, conversion and addition in their epilogue. Row-major.
#pragma once
#include <cstdint>
#include <memory>

#include "strata/tensor.h"

namespace strata::cuda {

// C (m, n) = op(A) op(B) [+ bias (n)] [+ C]; A, B and bias of type `in`, C of type `out`, summed in f32 (f32: no TF32).
// Strides are those of the matrices as stored.
struct GemmShape {
  bool transpose_a, transpose_b;
  int64_t m, n, k, lda, ldb, ldc;
  DType in, out;
  bool bias = false, accumulate = false;
  auto operator<=>(const GemmShape&) const = default;
};

// Chosen once: of the algorithms that cuBLASLt proposes the fastest on these pointers, remembered by shape. Throws
// Error naming the package where the library is missing.
class Gemm {
 public:
  Gemm(const GemmShape& shape, const void* A, const void* B, const void* bias, void* C, void* workspace);
  ~Gemm();
  static int64_t workspace();  // bytes
  void run(const void* A, const void* B, const void* bias, void* C, void* workspace, void* queue) const;

 private:
  struct Plan;
  GemmShape shape_;
  std::shared_ptr<const Plan> plan_;
};

}  // namespace strata::cuda
