// move: bytes between the device's memory and pinned host memory, on the copy engines.
#include <cuda_runtime.h>

#include <string>

#include "cuda/register.h"

namespace strata::cuda {
namespace {

const Registration kind("move", [](const Binding& b) -> Launch {
  return [to = b.out<void>(0), from = b.in<void>(0), bytes = size_t(b.input(0).bytes()), queue = b.queue()] {
    if (const cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(queue));
        error != cudaSuccess)
      throw Error(std::string("cannot copy to or from the CUDA device: ") + cudaGetErrorString(error) + ".",
                  ExitCode::failed);
  };
});

}  // namespace
}  // namespace strata::cuda
