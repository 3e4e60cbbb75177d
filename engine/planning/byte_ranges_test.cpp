// Pieces between places against a list with a value for every byte.
#include "engine/planning/byte_ranges.h"

#include <gtest/gtest.h>

#include <random>

namespace strata::byte_ranges_test {
namespace {

TEST(ByteRanges, PiecesAreWhatWasSetByteByByte) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 50; ++round) {
    const int bytes = 1 + int(random() % 700);
    std::vector<std::pair<int, int>> ranges;
    Places places;
    for (int i = 0; i < 60; ++i) {
      int begin = int(random() % uint32_t(bytes)), end = int(random() % uint32_t(bytes + 1));
      if (end < begin) std::swap(begin, end);
      ranges.emplace_back(begin, end);
      places.add(begin), places.add(end);
    }
    places.sort();
    RangeValues<int> pieces(places.size());
    std::vector<int> by_byte(size_t(bytes), 0);
    for (int step = 1; step < 400; ++step) {
      const auto& [begin, end] = ranges[random() % ranges.size()];
      if (random() % 2 == 0) {
        pieces.set(places[begin], places[end], step);
        std::fill(by_byte.begin() + begin, by_byte.begin() + end, step);
        continue;
      }
      // What is asked for may be changed; values of neighbours may be equal.
      std::vector<int> found;
      pieces.over(places[begin], places[end], [&](int& value) {
        if (found.empty() || found.back() != value) found.push_back(value);
        value = step;
      });
      std::vector<int> right;
      for (int byte = begin; byte < end; ++byte)
        if (right.empty() || right.back() != by_byte[size_t(byte)]) right.push_back(by_byte[size_t(byte)]);
      std::fill(by_byte.begin() + begin, by_byte.begin() + end, step);
      ASSERT_EQ(found, right) << "round " << round << ", step " << step;
    }
  }
}

TEST(ByteRanges, PlacesAreFoundHoweverOftenTheyAreAdded) {
  Places places;
  for (int64_t i = 0; i < 100'000; ++i) places.add(i % 300 * (int64_t{1} << 40));
  places.sort();
  ASSERT_EQ(places.size(), 300u);
  for (int64_t i = 0; i < 300; ++i) EXPECT_EQ(places[i * (int64_t{1} << 40)], uint32_t(i));
}

}  // namespace
}  // namespace strata::byte_ranges_test
