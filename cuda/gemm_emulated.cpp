// gemm.h as plain loops, for the emulator's tests.
#include "cuda/emulator.h"
#include "cuda/gemm.h"

namespace strata::cuda {
namespace {

void multiply(const GemmShape& s, const void* A, const void* B, const void* bias, void* C) {
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
      const float rounded = float(sum);
      from_f32(s.out, &rounded, at(C, s.out, i * s.ldc + j), 1);
    }
}

}  // namespace

struct Gemm::Plan {};
Gemm::Gemm(const GemmShape& shape, const void*, const void*, const void*, void*, void*) : shape_(shape) {}
Gemm::~Gemm() = default;
int64_t Gemm::workspace() { return 4096; }

void Gemm::run(const void* A, const void* B, const void* bias, void* C, void*, void* queue) const {
  enqueue(queue, [=, s = shape_] { multiply(s, A, B, bias, C); });
}

}  // namespace strata::cuda
