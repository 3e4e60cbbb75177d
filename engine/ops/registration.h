// Helpers to register op kinds: kernels from plain lambdas, and reference kernels for float and double from one.
#pragma once
#include <utility>

#include "strata/builder.h"
#include "strata/op_kind.h"

namespace strata {

// Runs a function when the library is loaded.
struct AtLoad {
  template <class Function>
  explicit AtLoad(Function&& function) {
    function();
  }
};

// The dtype a kernel computes in: that of its first floating-point input, or of its output.
inline DType compute_type(const OpView& view) {
  for (int i = 0; i < view.inputs(); ++i)
    if (view.has_input(i) && (view.input(i).dtype == DType::f32 || view.input(i).dtype == DType::f64))
      return view.input(i).dtype;
  return view.output(0).dtype;
}

// body(binding) runs the op once.
template <class Body>
Kernel cpu_kernel(Body body, std::function<int64_t(const OpView&, int)> workspace = {}) {
  return {[body](const Binding& binding) -> Launch {
            require(compute_type(binding) == DType::f32, binding, "f32 tensors on the cpu backend");
            return [body, binding] { body(binding); };
          },
          std::move(workspace)};
}

// body(binding, T{}) runs the op once in T = float or double.
template <class Body>
Kernel reference_kernel(Body body) {
  return {[body](const Binding& binding) -> Launch {
            if (compute_type(binding) == DType::f64) return [body, binding] { body(binding, double{}); };
            return [body, binding] { body(binding, float{}); };
          },
          {}};
}

inline bool is_float(const Tensor& tensor) { return tensor.dtype == DType::f32 || tensor.dtype == DType::f64; }
inline bool is_scalar(const Tensor& tensor) { return tensor.dtype == DType::f64 && tensor.shape == Shape{1}; }
inline TensorSpec like(const Tensor& tensor) { return {tensor.shape, tensor.dtype}; }

constexpr int64_t kGrain = 4096;  // elements worth handing to another thread

}  // namespace strata
