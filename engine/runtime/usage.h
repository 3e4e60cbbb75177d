// Measured memory of this process, to hold against the plan.
#pragma once
#include <cstddef>
#include <cstdint>

namespace strata {

int64_t peak_resident_bytes();                                  // high-water mark of resident memory (VmHWM)
int64_t resident_bytes();                                       // resident memory now
void give_back_memory();                                        // what was freed, to the system
int64_t resident_bytes(const std::byte* begin, int64_t bytes);  // pages of this range that are in memory now

}  // namespace strata
