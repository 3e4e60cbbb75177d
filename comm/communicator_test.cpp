// Every collective over threads, against plain loops: sizes, uneven parts, many pieces, types, orders; and what happens
// when ranks disagree or are missing.
#include "strata/communicator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>

#include "comm/reduce.h"
#include "comm/world.h"
#include "strata/convert.h"
#include "strata/error.h"

namespace strata::communicator_test {
namespace {

Piece piece(std::vector<float>& values, int64_t begin, int64_t end) {
  return {reinterpret_cast<std::byte*>(values.data() + begin), (end - begin) * 4};
}
// A sequence cut into pieces at random places.
Pieces pieces(std::vector<float>& values, std::mt19937& random, int64_t begin = 0, int64_t end = -1) {
  if (end < 0) end = int64_t(values.size());
  Pieces result;
  while (begin < end) {
    const int64_t n = 1 + int64_t(random() % uint64_t(end - begin));
    result.add(piece(values, begin, begin + n));
    begin += n;
  }
  return result;
}

std::vector<int> everybody(int size) {
  std::vector<int> list;
  for (int r = 0; r < size; ++r) list.push_back(r);
  return list;
}

float value(int rank, int64_t i) { return float(std::sin(double(rank * 7919 + i * 13 + 1))); }

float tree(const std::vector<float>& leaves, int begin, int end) {
  if (end - begin == 1) return leaves[size_t(begin)];
  int split = 1;
  while (split * 2 < end - begin) split *= 2;
  return tree(leaves, begin, begin + split) + tree(leaves, begin + split, end);
}

float expected(int size, int64_t i) {
  std::vector<float> leaves;
  for (int r = 0; r < size; ++r) leaves.push_back(value(r, i));
  return tree(leaves, 0, size);
}

class Collectives : public testing::TestWithParam<int> {};

TEST_P(Collectives, ReduceGatherAndScatter) {
  const int size = GetParam();
  run_local(size, [&](World& world) {
    const auto group = world.group("data", everybody(size));
    const int rank = world.rank();
    std::mt19937 random(uint32_t(rank + 1));
    for (int64_t count : {int64_t(1), int64_t(7), int64_t(1000), int64_t(40000), int64_t(300001)}) {
      std::vector<float> data(static_cast<size_t>(count));
      const auto fill = [&] {
        for (int64_t i = 0; i < count; ++i) data[size_t(i)] = value(rank, i);
      };
      fill();
      group->all_reduce(pieces(data, random), DType::f32);
      for (int64_t i = 0; i < count; ++i) ASSERT_EQ(data[size_t(i)], expected(size, i)) << i << " of " << count;
      fill();
      group->all_reduce(pieces(data, random), DType::f32, Reduction::max);
      for (int64_t i = 0; i < count; ++i) {
        float most = value(0, i);
        for (int r = 1; r < size; ++r) most = std::max(most, value(r, i));
        ASSERT_EQ(data[size_t(i)], most);
      }
      // Uneven parts, some empty: rank r holds what share_of says of a third of the elements more than once.
      std::vector<Pieces> parts;
      std::vector<Range> shares;
      for (int r = 0; r < size; ++r) {
        shares.push_back(share_of(std::max<int64_t>(1, count / 3), r, size));
        parts.push_back(pieces(data, random, shares.back().begin, shares.back().end));
      }
      fill();
      std::vector<float> result(size_t(shares[size_t(rank)].count()));
      group->reduce_scatter(parts, pieces(result, random), DType::f32);
      for (size_t i = 0; i < result.size(); ++i)
        ASSERT_EQ(result[i], expected(size, shares[size_t(rank)].begin + int64_t(i)));
      std::vector<float> gathered(data.size(), -1);
      std::vector<Pieces> places;
      for (const Range& share : shares) places.push_back(pieces(gathered, random, share.begin, share.end));
      for (int64_t i = shares[size_t(rank)].begin; i < shares[size_t(rank)].end; ++i) gathered[size_t(i)] = float(i);
      group->all_gather(places);
      for (int64_t i = 0; i < shares.back().end; ++i) ASSERT_EQ(gathered[size_t(i)], float(i));
      const int root = int(count % size);
      if (rank == root) fill();
      group->broadcast(pieces(data, random), root);
      for (int64_t i = 0; i < count; ++i) ASSERT_EQ(data[size_t(i)], value(root, i));
      group->barrier();
    }
  });
}

// As a program of one rank adds 16 bits: each sum is rounded before the next addition.
TEST_P(Collectives, SumsOf16BitsCanBeRoundedAfterEachAddition) {
  const int size = GetParam();
  const std::function<float(int, int, int64_t)> rounded_tree = [&](int first, int count, int64_t i) {
    float sum = value(first, i);
    if (count > 1) {
      const int split = tree_split(count);
      sum = rounded_tree(first, split, i) + rounded_tree(first + split, count - split, i);
    }
    uint16_t bits = 0;
    from_f32(DType::bf16, &sum, &bits, 1);
    to_f32(DType::bf16, &bits, &sum, 1);
    return sum;
  };
  run_local(size, [&](World& world) {
    const auto group = world.group("data", everybody(size), true);
    for (const int64_t count : {int64_t(7), int64_t(200001)}) {
      std::vector<float> own(static_cast<size_t>(count)), sums(own);
      for (int64_t i = 0; i < count; ++i) own[size_t(i)] = value(world.rank(), i);
      std::vector<uint16_t> half(own.size());
      from_f32(DType::bf16, own.data(), half.data(), count);
      group->all_reduce({{reinterpret_cast<std::byte*>(half.data()), 2 * count}}, DType::bf16);
      to_f32(DType::bf16, half.data(), sums.data(), count);
      for (int64_t i = 0; i < count; i += 97) ASSERT_EQ(sums[size_t(i)], rounded_tree(0, size, i)) << i;
    }
  });
}

TEST_P(Collectives, AllToAllAndPairs) {
  const int size = GetParam();
  run_local(size, [&](World& world) {
    const auto group = world.group("data", everybody(size));
    const int rank = world.rank();
    const auto count = [](int from, int to) { return (from * 31 + to * 17) % 5 * 40000 + from; };
    std::vector<std::vector<float>> out, in;
    for (int r = 0; r < size; ++r) {
      out.emplace_back(size_t(count(rank, r)), float(rank * 100 + r));
      in.emplace_back(size_t(count(r, rank)), -1.f);
    }
    std::vector<Pieces> send, receive;
    for (int r = 0; r < size; ++r) {
      send.push_back({piece(out[size_t(r)], 0, int64_t(out[size_t(r)].size()))});
      receive.push_back({piece(in[size_t(r)], 0, int64_t(in[size_t(r)].size()))});
    }
    for (int round = 0; round < 3; ++round) {
      for (auto& list : in) std::fill(list.begin(), list.end(), -1.f);
      group->all_to_all(send, receive);
      for (int r = 0; r < size; ++r)
        for (float got : in[size_t(r)]) ASSERT_EQ(got, float(r * 100 + rank));
    }
    std::vector<float> token(100000, float(rank));
    if (size == 1) return;
    for (int round = 0; round < 2; ++round) {  // around a ring
      std::vector<float> got(token.size());
      if (rank == 0) group->send({piece(token, 0, 100000)}, 1);
      group->receive({piece(got, 0, 100000)}, (rank + size - 1) % size);
      ASSERT_EQ(got.back(), float((rank + size - 1) % size));
      if (rank != 0) group->send({piece(token, 0, 100000)}, (rank + 1) % size);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, testing::Values(1, 2, 3, 4, 5, 8));

TEST(Communicator, ReducesOtherTypes) {
  run_local(3, [](World& world) {
    const auto group = world.group("data", {0, 1, 2});
    std::vector<double> d(1000, 0.1 * (world.rank() + 1));
    group->all_reduce({{reinterpret_cast<std::byte*>(d.data()), 8000}}, DType::f64);
    EXPECT_EQ(d[999], (0.1 + 0.2) + 0.1 * 3);
    std::vector<int32_t> i(1000, 1 << world.rank());
    group->all_reduce({{reinterpret_cast<std::byte*>(i.data()), 4000}}, DType::i32);
    EXPECT_EQ(i[0], 7);
    // bf16: 1 + 2^-8 + 2^-8 = 1 + 2^-7, though each of the two alone would be rounded away.
    std::vector<uint16_t> h(40000, world.rank() == 0 ? 0x3f80 : 0x3b80);
    group->all_reduce({{reinterpret_cast<std::byte*>(h.data()), 80000}}, DType::bf16);
    EXPECT_EQ(h[39999], 0x3f81);
    // f16: 1 + 2^-11 + 2^-11 = 1 + 2^-10 likewise.
    std::vector<uint16_t> f(40000, world.rank() == 0 ? 0x3c00 : 0x1000);
    group->all_reduce({{reinterpret_cast<std::byte*>(f.data()), 80000}}, DType::f16);
    EXPECT_EQ(f[39999], 0x3c01);
    EXPECT_THROW(group->all_reduce({{reinterpret_cast<std::byte*>(h.data()), 2}}, DType::u8), Error);
  });
}

TEST(Communicator, GroupsOfSomeRanks) {
  run_local(4, [](World& world) {
    const int rank = world.rank(), half = rank / 2;
    const auto pair = world.group("pair", {half * 2, half * 2 + 1});
    const auto across = world.group("across", {rank % 2, rank % 2 + 2});
    std::vector<float> data(50000, float(rank));
    pair->all_reduce({piece(data, 0, 50000)}, DType::f32);
    EXPECT_EQ(data[7], half == 0 ? 1.f : 5.f);
    across->all_reduce({piece(data, 0, 50000)}, DType::f32);
    EXPECT_EQ(data[7], 6.f);
    EXPECT_EQ(across->rank(), half);
  });
}

TEST(Communicator, GathersTexts) {
  run_local(3, [](World& world) {
    for (int i = 0; i < 5; ++i)
      EXPECT_EQ(world.gather(std::to_string(world.rank() + i)),
                (std::vector<std::string>{std::to_string(i), std::to_string(i + 1), std::to_string(i + 2)}));
  });
}

std::string error_of(int size, const std::function<void(World&)>& body, double timeout) {
  try {
    run_local(size, body, timeout);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Communicator, RanksThatDisagreeAreTold) {
  const std::string text = error_of(
      2,
      [](World& world) {
        const auto group = world.group("data", {0, 1});
        std::vector<float> data(60000);
        if (world.rank() == 0)
          group->all_reduce({piece(data, 0, 60000)}, DType::f32);
        else
          group->all_gather({{piece(data, 0, 30000)}, {piece(data, 30000, 60000)}});
      },
      5);
  EXPECT_NE(text.find("is in another operation"), std::string::npos) << text;
}

TEST(Communicator, AMissingRankIsNamed) {
  const std::string text = error_of(
      3,
      [](World& world) {
        const auto group = world.group("data", {0, 1, 2});
        std::vector<float> data(10);
        group->all_reduce({piece(data, 0, 10)}, DType::f32);
        if (world.rank() != 2) group->barrier();
      },
      0.3);
  EXPECT_NE(text.find("barrier over \"data\" (operation 2): rank 2 did not come"), std::string::npos) << text;
}

// One that lives and gives no text: only a limit of time ends the wait.
TEST(Communicator, ARankWithoutATextIsNamed) {
  const std::string text = error_of(
      3,
      [](World& world) {
        while (world.rank() == 1) world.check(), std::this_thread::yield();
        world.gather("here");
      },
      0.3);
  EXPECT_EQ(text, "rank 1 did not come within 0.3 s, where texts of all ranks are exchanged.");
}

TEST(Communicator, AFailingRankEndsTheOthers) {
  std::atomic<int> told{0};
  const std::string text = error_of(
      3,
      [&](World& world) {
        const auto group = world.group("data", {0, 1, 2});
        if (world.rank() == 1) throw Error("out of luck", ExitCode::failed);
        try {
          group->barrier();
        } catch (const Error& error) {
          told += std::string(error.what()).find("rank 1 failed: out of luck") != std::string::npos;
          throw;
        }
      },
      60);
  EXPECT_EQ(text, "out of luck");
  EXPECT_EQ(told, 2);
}

}  // namespace
}  // namespace strata::communicator_test
