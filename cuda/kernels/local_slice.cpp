// local_slice, replicated: copies within the device's memory, on the copy engines.
#include <cuda_runtime.h>

#include <string>

#include "cuda/register.h"

namespace strata::cuda {
namespace {

void must_slice(cudaError_t error) {
  if (error != cudaSuccess)
    throw Error(std::string("cannot copy within the CUDA device: ") + cudaGetErrorString(error) + ".",
                ExitCode::failed);
}

// Where the output's share begins: the last of its splits along the dimension says so. Pairs of chunks stand in the
// order of ranks.
int64_t first_of(const Binding& b, int dimension) {
  for (size_t s = b.output(0).layout.size(); s-- > 0;)
    if (const Split& split = b.output(0).layout[s]; split.dimension == dimension)
      return split.pair > 0 ? 2 * split.first : split.first;
  return 0;
}

const Registration slices("local_slice", [](const Binding& b) -> Launch {
  const int dimension = int(b.attributes().integer("dimension", 0));
  const Shape& whole = b.input(0).shape;
  int64_t outer = 1, inner = size_of(b.input(0).dtype);
  for (int d = 0; d < dimension; ++d) outer *= whole[size_t(d)];
  for (size_t d = size_t(dimension) + 1; d < whole.size(); ++d) inner *= whole[d];
  const size_t rows = size_t(outer), width = size_t(b.output(0).shape[size_t(dimension)] * inner),
               step = size_t(whole[size_t(dimension)] * inner);
  return [to = b.out<std::byte>(0), from = b.in<std::byte>(0) + first_of(b, dimension) * inner, rows, width, step,
          queue = static_cast<cudaStream_t>(b.queue())] {
    if (width > 0) must_slice(cudaMemcpy2DAsync(to, width, from, step, width, rows, cudaMemcpyDefault, queue));
  };
});

const Registration copies("replicated", [](const Binding& b) -> Launch {
  return [to = b.out<std::byte>(0), from = b.in<std::byte>(0), bytes = size_t(b.input(0).bytes()),
          queue = static_cast<cudaStream_t>(b.queue())] {
    if (to != from) must_slice(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, queue));
  };
});

}  // namespace
}  // namespace strata::cuda
