// Matrix products on the GPU: cuBLASLt's, with bias, conversion and addition in their epilogue. Row-major.
#pragma once
#include <cstdint>
#include <memory>

#include "strata/tensor.h"

namespace strata::cuda {

// C (m, n) = op(A) op(B) [+ bias (n)] [+ C] or (op(A) op(B)) gelu'(x (m, n)); A, B and bias of type `in`, x and C of
// type `out`, summed in f32 (f32: no TF32). Strides are those of the matrices as stored; x has C's.
struct GemmShape {
  bool transpose_a, transpose_b;
  int64_t m, n, k, lda, ldb, ldc;
  DType in, out;
  bool bias = false, accumulate = false, gelu_gradient = false;
  auto operator<=>(const GemmShape&) const = default;
};

struct GemmMemory {
  const void *A, *B;
  void *C, *workspace;
  const void* bias = nullptr;
  const void* x = nullptr;  // with gelu_gradient
};

// Chosen once: of the algorithms that cuBLASLt proposes the fastest on this memory, remembered by shape, and from run
// to run (choices.h): a rerun gives the same bits. Throws Error naming the package where the library is missing.
class Gemm {
 public:
  Gemm(const GemmShape& shape, const GemmMemory& memory);
  ~Gemm();
  static int64_t workspace();                      // bytes
  bool known() const { return plan_ != nullptr; }  // false: the library has no way to do it; others throw
  void run(const GemmMemory& memory, void* queue) const;

 private:
  struct Plan;
  GemmShape shape_;
  std::shared_ptr<const Plan> plan_;
};

}  // namespace strata::cuda
