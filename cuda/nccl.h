// Groups of ranks over NCCL (developer.nvidia.com/nccl): operations go into the queue of a stream of exchanges, and
// into graphs.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/world.h"

namespace strata::cuda {

// Called by all ranks of the world in the same order, each with the members of its own group. Throws Error where the
// library is missing (naming the package) or refuses. Sums are taken in NCCL's order, the same in every run of a layout
// but not the tree of other groups.
std::unique_ptr<Communicator> nccl_group(World& world, const std::string& name, const std::vector<int>& members,
                                         int device, void* queue, double timeout_seconds);

// Adds 1 to a number in pinned memory when the queue comes to it (kernels/count.cu).
void count_up(volatile uint32_t* number, void* queue);

}  // namespace strata::cuda
