// Placement by stretches against a look at every buffer.
#include "engine/planning/ordered_placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace strata::ordered_placement_test {
namespace {

// Each at the lowest of the smallest gaps among all that were placed before and live at the same time.
std::vector<int64_t> one_by_one(const std::vector<Buffer>& buffers, const std::vector<uint32_t>& order) {
  std::vector<int64_t> offsets(buffers.size(), -1);
  for (uint32_t b : order) {
    std::vector<std::pair<int64_t, int64_t>> taken;
    for (size_t p = 0; p < buffers.size(); ++p)
      if (offsets[p] >= 0 && buffers[p].last >= buffers[b].first && buffers[b].last >= buffers[p].first)
        taken.push_back({offsets[p], offsets[p] + buffers[p].bytes});
    std::sort(taken.begin(), taken.end());
    int64_t end = 0, best = -1, room = 0;
    for (const auto& [from, to] : taken) {
      if (from - end >= buffers[b].bytes && (best < 0 || from - end < room)) best = end, room = from - end;
      end = std::max(end, to);
    }
    offsets[b] = best >= 0 ? best : end;
  }
  return offsets;
}

TEST(OrderedPlacement, IsThatOfALookAtEveryBuffer) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto below = [&](size_t n) { return size_t(random() % n); };
  for (int round = 0; round < 40; ++round) {
    const size_t ops = 1 + below(4000), longest = 1 + below(ops);
    std::vector<Buffer> buffers;
    for (size_t i = 0, count = 1 + below(400); i < count; ++i) {
      const size_t first = below(ops), life = below(4) == 0 ? below(longest) : below(5);
      buffers.push_back({.tensor = {},
                         .bytes = 64 * int64_t(1 + below(10)),
                         .first = int32_t(first),
                         .last = int32_t(std::min(ops - 1, first + life))});
    }
    std::vector<uint32_t> order(buffers.size());
    std::iota(order.begin(), order.end(), 0u);
    OrderedPlacement placement(buffers, ops, INT64_MAX);
    for (int again = 0; again < 2; ++again) {
      std::shuffle(order.begin(), order.end(), random);
      const std::vector<int64_t> right = one_by_one(buffers, order);
      const int64_t bytes = placement.place(order, INT64_MAX);
      int64_t top = 0;
      for (size_t b = 0; b < buffers.size(); ++b) {
        ASSERT_EQ(placement.buffers()[b].offset, right[b]) << "round " << round << ", buffer " << b;
        top = std::max(top, right[b] + buffers[b].bytes);
      }
      EXPECT_EQ(bytes, top);
      const Buffer& highest = buffers[order[placement.highest()]];
      EXPECT_EQ(right[order[placement.highest()]] + highest.bytes, top);
      EXPECT_EQ(placement.place(order, top), -1);  // not below
    }
  }
}

// A buffer costs visits for each neighbour, however few ranges those are.
TEST(OrderedPlacement, EndsWhereItWouldTakeTooLong) {
  std::vector<Buffer> buffers(300, Buffer{.tensor = {}, .bytes = 64, .first = 0, .last = 2000});
  std::vector<uint32_t> order(buffers.size());
  std::iota(order.begin(), order.end(), 0u);
  const int64_t visits = (1 + 8) * 300 * 299 / 2;
  OrderedPlacement enough(buffers, 2001, visits), too_few(buffers, 2001, visits - 1);
  EXPECT_EQ(enough.place(order, INT64_MAX), 300 * 64);
  EXPECT_TRUE(enough.has_time());
  EXPECT_EQ(too_few.place(order, INT64_MAX), -1);
  EXPECT_FALSE(too_few.has_time());
}

}  // namespace
}  // namespace strata::ordered_placement_test
