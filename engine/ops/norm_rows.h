// How the norms cut their rows into parts, and how wide a row is in scratch memory.
#pragma once
#include <algorithm>
#include <cstdint>

namespace strata {

// Parts of `rows`, by their number alone: the columns' sums are the same for any number of threads.
inline int64_t parts_of(int64_t rows) { return std::clamp<int64_t>(rows / 32, 1, 64); }

// Elements of a row in scratch memory: whole vectors of 16.
inline int64_t padded(int64_t columns) { return (columns + 15) / 16 * 16; }

}  // namespace strata
