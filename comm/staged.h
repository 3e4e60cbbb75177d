// A group whose ranks keep their data in the memory of devices, over one that exchanges host memory: through pinned
// staging, piece by piece. For ranks that share a device, and for networks that only the host reaches.
#pragma once
#include <memory>

#include "strata/communicator.h"
#include "strata/device.h"

namespace strata {

// Holds 4 MiB of pinned host memory a rank of the group, beside what a plan counts. `device` must outlive it.
std::unique_ptr<Communicator> staged_communicator(std::unique_ptr<Communicator> inner, Device& device);

}  // namespace strata
