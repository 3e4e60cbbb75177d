// How large a program may become: so large that planning it fits into this machine's memory, and never larger than
// kMostOps. Asked before ops are made, so that a slip in a size is a message and not minutes and a full memory.
#pragma once
#include <cstdint>
#include <string>

namespace strata {

inline constexpr int64_t kMostOps = int64_t{1} << 23;  // minutes of planning
// Of an op while it is planned, tensors included (measured: 320 to 1500).
inline constexpr int64_t kPlanningBytes = 2048;

// kMostOps, or fewer where physical memory or the process's limit (ulimit -v) has no room for as many.
int64_t most_ops();

// Throws Error when there would be more ops than that; `what` begins the message: "a step of 4096 microbatches".
void require_room_for_ops(double ops, const std::string& what, const std::string& remedy);

}  // namespace strata
