// TensorIds against std::vector under random changes.
#include <gtest/gtest.h>

#include <random>

#include "strata/tensor.h"

namespace strata::tensor_ids_test {
namespace {

TensorId any(std::mt19937& random) { return {int32_t(random() % 100)}; }

void change(TensorIds& ids, std::vector<TensorId>& same, std::mt19937& random) {
  const auto at = [&] { return random() % (same.size() + 1); };
  switch (random() % 8) {
    case 0: {
      const size_t i = at();
      const TensorId id = any(random);
      EXPECT_EQ(*ids.insert(ids.begin() + i, id), id);
      same.insert(same.begin() + int64_t(i), id);
      break;
    }
    case 1: {
      const size_t i = at();
      const std::vector<TensorId> more(random() % 7, any(random));
      ids.insert(ids.begin() + i, more.data(), more.data() + more.size());
      same.insert(same.begin() + int64_t(i), more.begin(), more.end());
      break;
    }
    case 2: {
      const size_t i = at(), count = random() % (same.size() - i + 1);
      ids.erase(ids.begin() + i, ids.begin() + i + count);
      same.erase(same.begin() + int64_t(i), same.begin() + int64_t(i + count));
      break;
    }
    case 3: {
      const size_t size = random() % 12;
      ids.resize(size);
      same.resize(size);
      break;
    }
    case 4:
      ids.push_back(any(random));
      same.push_back(ids.back());
      break;
    case 5:
      if (same.empty()) break;
      ids.pop_back();
      same.pop_back();
      break;
    case 6: {
      TensorIds copy = ids;
      if (!copy.empty()) copy[0] = {-7};  // its own
      ids = TensorIds(ids);
      break;
    }
    default: {
      TensorIds moved = std::move(ids);
      ids = moved;
      ids = std::move(moved);
    }
  }
}

TEST(TensorIds, IsAVector) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    TensorIds ids;
    std::vector<TensorId> same;
    for (int i = 0; i < 60; ++i) {
      change(ids, same, random);
      ASSERT_EQ(std::vector<TensorId>(ids), same) << "round " << round << ", change " << i;
      ASSERT_EQ(ids.size(), same.size());
      ASSERT_EQ(ids, TensorIds(same));
      EXPECT_THROW(ids.at(ids.size()), std::out_of_range);
      if (!same.empty()) {
        ASSERT_EQ(ids.front(), same.front());
      }
    }
  }
  EXPECT_FALSE((TensorIds{{1}, {2}} == TensorIds{{1}, {3}}));
  EXPECT_FALSE((TensorIds{{1}, {2}} == TensorIds{{1}}));
}

}  // namespace
}  // namespace strata::tensor_ids_test
