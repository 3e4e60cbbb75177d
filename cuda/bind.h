// From a bound op to a kernel: choice of the element type, sizes of the grid.
#pragma once
#include <algorithm>
#include <string>

#include "cuda/kernel.h"
#include "cuda/register.h"
#include "strata/convert.h"

namespace strata::cuda {

// Calls body(T{}) with T = float, bf16 or f16.
template <class Body>
auto with_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f32:
      return body(float{});
    case DType::bf16:
      return body(bf16{});
    case DType::f16:
      return body(f16{});
    default:
      throw Error("the cuda backend computes in f32, bf16 and f16, not in " + std::string(name_of(dtype)) + ".");
  }
}

inline unsigned blocks(int64_t items, int64_t a_block) { return unsigned((items + a_block - 1) / a_block); }
inline int64_t count(const Tensor& tensor) { return elements(tensor.shape); }

}  // namespace strata::cuda
