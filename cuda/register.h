// Registration of kernels for the backend "cuda".
#pragma once
#include <functional>
#include <utility>

#include "strata/op_kind.h"

namespace strata::cuda {

// Registers when the module is loaded; kinds of plugins may come later.
struct Registration {
  Registration(const char* kind, std::function<Launch(const Binding&)> bind,
               std::function<int64_t(const OpView&, int)> workspace = {},
               std::function<std::string(const OpView&, uint64_t)> fault = {}) {
    register_kernel(kind, "cuda", {std::move(bind), std::move(workspace), std::move(fault)});
  }
};

}  // namespace strata::cuda
