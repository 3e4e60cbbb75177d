// Sampling: every sequence once an epoch, in an order that seed and epoch alone decide.
#include "engine/data/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <set>

#include "engine/data/testing.h"

namespace strata::sampler_test {
namespace {

// A data set of files with the sizes given, whose tokens count on from 0 over all files.
TokenDataset counting(const TestFolder& folder, const std::vector<int64_t>& sizes) {
  std::vector<std::string> paths;
  int32_t next = 0;
  for (const int64_t size : sizes) {
    std::vector<int32_t> tokens(static_cast<size_t>(size));
    std::iota(tokens.begin(), tokens.end(), next);
    next += int32_t(size);
    paths.push_back(folder / (std::to_string(paths.size()) + ".bin"));
    TokenFileWriter writer(paths.back(), false);
    writer.append(tokens);
    writer.commit();
  }
  return TokenDataset(paths, next);
}

// First tokens of samples [from, from + count), after checking each sample's run of tokens and targets.
std::vector<int32_t> firsts(const Sampler& sampler, int64_t length, int64_t from, int64_t count) {
  std::vector<int32_t> result, tokens(size_t(length) + 1), targets(size_t(length) + 1);
  for (int64_t sample = from; sample < from + count; ++sample) {
    tokens.back() = targets.back() = -7;
    sampler.fill(sample, {tokens.data(), targets.data()});
    for (int64_t i = 0; i < length; ++i) {
      EXPECT_EQ(tokens[size_t(i)], tokens[0] + i);
      EXPECT_EQ(targets[size_t(i)], tokens[0] + i + 1);
    }
    EXPECT_EQ(tokens.back(), -7);
    EXPECT_EQ(targets.back(), -7);
    result.push_back(tokens[0]);
  }
  return result;
}

TEST(Sampler, WithoutShuffleSequencesComeInOrderAndNoneCrossesFiles) {
  const TestFolder folder;
  const TokenDataset data = counting(folder, {9, 4, 5, 1, 13});  // 2, 0, 1, 0 and 3 sequences of 4
  const Sampler sampler(data, 4, false, 1);
  EXPECT_EQ(sampler.sequences(), 6);
  const std::vector<int32_t> epoch{0, 4, 13, 19, 23, 27};
  EXPECT_EQ(firsts(sampler, 4, 0, 6), epoch);
  EXPECT_EQ(firsts(sampler, 4, 6, 6), epoch);
}

TEST(Sampler, LengthOneGivesEveryToken) {
  const TestFolder folder;
  const TokenDataset data = counting(folder, {4});
  EXPECT_EQ(firsts(Sampler(data, 1, false, 1), 1, 0, 3), (std::vector<int32_t>{0, 1, 2}));
}

TEST(Sampler, ShuffledEpochsHaveEverySequenceOnceInOrdersOfTheirOwn) {
  const TestFolder folder;
  const TokenDataset data = counting(folder, {301, 77, 502});
  const Sampler sampler(data, 3, true, 5), other(data, 3, true, 6), again(data, 3, true, 5);
  const int64_t n = sampler.sequences();
  ASSERT_EQ(n, 100 + 25 + 167);
  std::vector<int32_t> sorted = firsts(Sampler(data, 3, false, 0), 3, 0, n);
  std::set<std::vector<int32_t>> orders{sorted};
  for (int64_t epoch = 0; epoch < 4; ++epoch) {
    const std::vector<int32_t> order = firsts(sampler, 3, epoch * n, n);
    EXPECT_TRUE(std::is_permutation(order.begin(), order.end(), sorted.begin()));
    EXPECT_TRUE(orders.insert(order).second) << "epoch " << epoch << " repeats an order";
    // A resume in the middle sees what the uninterrupted run would have seen.
    EXPECT_EQ(firsts(again, 3, epoch * n + 17, 100), std::vector<int32_t>(order.begin() + 17, order.begin() + 117));
  }
  EXPECT_TRUE(orders.insert(firsts(other, 3, 0, n)).second) << "another seed gives the same order";
}

TEST(Sampler, OrderIsTheSameInEveryVersion) {
  // Recorded: a changed permutation would break the resume of runs that older versions began.
  std::vector<int64_t> order;
  for (int64_t i = 0; i < 10; ++i) order.push_back(permuted(i, 10, 1337, 2));
  EXPECT_EQ(order, (std::vector<int64_t>{6, 0, 5, 7, 8, 3, 4, 1, 9, 2}));
}

TEST(Sampler, PermutationsAreOneToOneAtEverySize) {
  for (int64_t size = 1; size <= 300; ++size) {
    std::vector<bool> seen(size_t(size), false);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t to = permuted(i, size, 42, 7);
      ASSERT_TRUE(to >= 0 && to < size);
      ASSERT_FALSE(seen[size_t(to)]) << "size " << size << " index " << i;
      seen[size_t(to)] = true;
    }
  }
  for (const int64_t size : {(int64_t{1} << 32) - 1, int64_t{1} << 32, (int64_t{1} << 40) + 1, INT64_MAX})
    for (const int64_t i : {int64_t{0}, size / 2, size - 1}) {
      const int64_t to = permuted(i, size, 1, 0);
      EXPECT_TRUE(to >= 0 && to < size);
    }
}

TEST(Sampler, EveryPlaceIsAsLikelyForEverySequence) {
  constexpr int64_t kEpochs = 20000;
  for (const int64_t size : {2, 3, 5, 10, 17, 64}) {
    std::vector<int64_t> hits(size_t(size * size));
    for (int64_t epoch = 0; epoch < kEpochs; ++epoch)
      for (int64_t i = 0; i < size; ++i) ++hits[size_t(i * size + permuted(i, size, 99, uint64_t(epoch)))];
    const double mean = double(kEpochs) / double(size);
    double chi = 0;
    for (const int64_t count : hits) chi += (double(count) - mean) * (double(count) - mean) / mean;
    // Rows and columns sum to the number of epochs, so chi² has about (n-1)² degrees of freedom, that mean and twice
    // that variance. Six standard deviations and 12 more for the skew at one degree: fixed seeds, so no flakiness.
    const double freedom = double((size - 1) * (size - 1));
    EXPECT_LT(chi, freedom + 6 * std::sqrt(2 * freedom) + 12) << "size " << size;
  }
}

TEST(Sampler, TextShorterThanASequenceIsRefused) {
  const TestFolder folder;
  const TokenDataset one = counting(folder, {8});
  EXPECT_EQ(Sampler(one, 7, true, 1).sequences(), 1);
  EXPECT_EQ(error_of(folder, [&] { Sampler(one, 8, true, 1); }),
            "0.bin: does not hold one sequence of 8 tokens and the token after it (8 tokens in all); use more text or "
            "lower data.sequence_length.");
  const TokenDataset three = counting(folder, {8, 3, 8});
  EXPECT_EQ(
      error_of(folder, [&] { Sampler(three, 8, true, 1); }),
      "0.bin and 2 more: no file holds one sequence of 8 tokens and the token after it (19 tokens in all); use more "
      "text or lower data.sequence_length.");
}

}  // namespace
}  // namespace strata::sampler_test
