// A file that a CUDA device reads and writes without the host's memory: GPUDirect Storage.
#pragma once
#include <memory>

#include "strata/device.h"

namespace strata::cuda {

// See Device::open_file.
std::unique_ptr<DeviceFile> open_direct(int device, int file, void* memory, int64_t bytes);

}  // namespace strata::cuda
