// Results that are larger than caches, written past them: a store that goes by way of a cache reads the memory first,
// which is half of what reading codes costs. For loops that decode a block into a few KiB and then are done with it.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace strata {

// Bytes from which a result is as good as sure to have left the caches before anybody reads it.
inline constexpr int64_t kPastCaches = 32 << 20;

// `count` numbers; whoever reads them on another thread waits for drain_stores() of this one.
inline void store_past_caches(float* to, const float* from, int64_t count) {
#ifdef __SSE2__
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
    for (; i < count; ++i) to[i] = from[i];
    return;
  }
#endif
  std::memcpy(to, from, size_t(count) * sizeof(float));
}
inline void drain_stores() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace strata
