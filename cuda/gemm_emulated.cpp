// gemm.h as plain loops, for the emulator's tests.
#include <cmath>

#include "cuda/emulator.h"
#include "cuda/gemm.h"

namespace strata::cuda {
namespace {

void multiply(const GemmShape& s, const GemmMemory& memory) {
  const auto& [A, B, C, workspace, bias, x] = memory;
  const auto value = [](DType type, const void* data, int64_t i) {
    float result;
    to_f32(type, at(data, type, i), &result, 1);
    return result;
  };
  for (int64_t i = 0; i < s.m; ++i)
    for (int64_t j = 0; j < s.n; ++j) {
      double sum = s.accumulate ? double(value(s.out, C, i * s.ldc + j)) : 0;
      for (int64_t l = 0; l < s.k; ++l)
        sum += double(value(s.in, A, s.transpose_a ? l * s.lda + i : i * s.lda + l)) *
               double(value(s.in, B, s.transpose_b ? j * s.ldb + l : l * s.ldb + j));
      if (s.bias) sum += double(value(s.in, bias, j));
      if (s.gelu_gradient) {
        const double z = double(value(s.out, x, i * s.ldc + j)), k = 0.7978845608028654;
        const double t = std::tanh(k * (z + 0.044715 * z * z * z));
        sum *= 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * k * (1 + 3 * 0.044715 * z * z);
      }
      const float rounded = float(sum);
      from_f32(s.out, &rounded, at(C, s.out, i * s.ldc + j), 1);
    }
}

}  // namespace

struct Gemm::Plan {};
// As cuBLASLt does, this knows no way where x's stride is not a multiple of 8.
Gemm::Gemm(const GemmShape& shape, const GemmMemory&) : shape_(shape) {
  if (!shape.gelu_gradient || shape.ldc % 8 == 0) plan_ = std::make_shared<Plan>();
}
Gemm::~Gemm() = default;
int64_t Gemm::workspace() { return 4096; }

void Gemm::run(const GemmMemory& memory, void* queue) const {
  enqueue(queue, [s = shape_, memory] { multiply(s, memory); });
}

}  // namespace strata::cuda
