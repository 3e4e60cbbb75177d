// Measures how fast an asynchronous device multiplies, moves bytes and starts kernels, with its own kernels.
#pragma once
#include <string>

#include "engine/planning/rates.h"
#include "strata/device.h"

namespace strata {

// Sets flops, half_flops, memory, copy, launch and the peaks; the rest is left alone. Sizes grow until a measurement
// takes long enough, up to 1 GiB of the device's memory, which is given back; takes a fraction of a second on a GPU.
void measure_device(Device& device, const std::string& backend, Rates& rates);

// The same in a process of its own, so that this one keeps out of the device's libraries (they forbid fork); false
// where no device can be opened.
bool measure_device_apart(const std::string& backend, int index, Rates& rates);

}  // namespace strata
