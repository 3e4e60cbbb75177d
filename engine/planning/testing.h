// For tests of memory plans.
#pragma once
#include <gtest/gtest.h>

#include "engine/planning/memory_plan.h"

namespace strata::test {

// No two buffers that live at once overlap, and everything lies inside the region.
inline void check_plan(const MemoryPlan& plan) {
  for (size_t a = 0; a < plan.buffers.size(); ++a) {
    const Buffer& x = plan.buffers[a];
    ASSERT_GE(x.offset, 0);
    ASSERT_LE(x.offset + x.bytes, plan.device().transient_bytes);
    for (size_t b = a + 1; b < plan.buffers.size(); ++b) {
      const Buffer& y = plan.buffers[b];
      const bool together = x.first <= y.last && y.first <= x.last,
                 overlap = x.offset < y.offset + y.bytes && y.offset < x.offset + x.bytes;
      ASSERT_FALSE(together && overlap) << "buffers " << a << " and " << b;
    }
  }
  EXPECT_GE(plan.device().transient_bytes, plan.device().live_peak_bytes);
}

}  // namespace strata::test
