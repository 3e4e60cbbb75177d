// The time since some moment in the past, in seconds: for durations and limits, never set back.
#pragma once
#include <chrono>

namespace strata {

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace strata
