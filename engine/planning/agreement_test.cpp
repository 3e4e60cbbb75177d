// Jobs of up to eight ranks by chance: those whose exchanges agree are accepted and end on real groups that hand over
// nothing before all members have come; those with one exchange swapped, dropped or changed on one rank are refused.
#include "engine/planning/agreement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

#include "comm/world.h"
#include "strata/builder.h"
#include "strata/error.h"

namespace strata::agreement_test {
namespace {

constexpr Stream kFirst = Stream::exchange, kSecond = Stream::read;  // any two serve

ExchangeStep step_of(std::string what, std::string axis, Stream stream = kFirst) {
  return {std::move(what), std::move(axis), stream, {}};
}

std::string verdict(const std::vector<RankExchanges>& ranks) {
  try {
    require_agreement(ranks);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::failed);
    return error.what();
  }
  return "";
}

std::vector<RankExchanges> job_of(const Mesh::Sizes& sizes, const std::vector<ExchangeStep>& steps) {
  std::vector<RankExchanges> ranks;
  for (int r = 0; r < Mesh(0, sizes).size(); ++r) ranks.push_back({Mesh(r, sizes), steps});
  return ranks;
}

TEST(Agreement, NamesTheRanksAndTheirExchanges) {
  std::vector<RankExchanges> ranks = job_of({{"shard", 3}}, {step_of("a", "shard"), step_of("b", "shard")});
  EXPECT_EQ(verdict(ranks), "");
  ranks[1].steps[1].what = "c";
  const std::string changed = verdict(ranks);
  EXPECT_NE(changed.find("ranks make different exchanges over the axis shard: rank "), std::string::npos) << changed;
  EXPECT_NE(changed.find("rank 1 c"), std::string::npos) << changed;
  ranks[1].steps.pop_back();
  EXPECT_EQ(verdict(ranks),
            "the ranks' exchanges would never end: rank 0 stands at b over shard; rank 1 is done; rank 2 stands at b "
            "over shard. This is a mistake in the plan.");
}

// Two ranks, two streams: each finishes on one what the other one needs on the other first.
TEST(Agreement, FindsWaitsThatGoRoundOverRanks) {
  std::vector<RankExchanges> ranks =
      job_of({{"shard", 2}}, {step_of("a", "shard", kFirst), step_of("b", "shard", kSecond)});
  EXPECT_EQ(verdict(ranks), "");
  ranks[0].steps[1].after[size_t(kFirst)] = 1;
  EXPECT_EQ(verdict(ranks), "");
  ranks[1].steps[0].after[size_t(kSecond)] = 1;
  EXPECT_EQ(verdict(ranks),
            "the ranks' exchanges would never end: rank 0 stands at b over shard and a over shard; rank 1 stands at b "
            "over shard and a over shard. This is a mistake in the plan.");
}

// From a program: an exchange waits for what its inputs were made from, through the other stream.
TEST(Agreement, SequencesComeFromProgramsAndTheirWaits) {
  Program program;
  Builder build(program);
  const TensorId x = build.data("x", {6, 4}, DType::f32);
  const Attributes sum{{"axis", "shard"}, {"reduction", "sum"}};
  const TensorId y = build.emit("all_reduce", {x}, sum);
  const TensorId z = build.emit("gelu", {y});
  build.emit("all_reduce", {z}, sum);
  program[y].layout = {{.dimension = 0, .axis = "tensor", .full = 12}};
  // The last one as if it were on a stream of its own, behind compute, which is behind the first. Waits for the step
  // before, where steps overlap, order nothing of this one.
  program.ops[2].stream = kSecond;
  const std::vector<std::vector<Wait>> waits{
      {{Stream::compute, 0}, {kSecond, -2}}, {{kFirst, 1}}, {{Stream::compute, 1}}};
  const std::vector<ExchangeStep> steps = exchanges_of(program, waits, [](Stream) { return false; });
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[0].what, "all_reduce axis = shard reduction = sum: f32(6, 4) -> f32(12, 4) by tensor in 0");
  EXPECT_EQ(steps[0].after[size_t(kSecond)], 0);
  EXPECT_EQ(steps[1].after[size_t(kFirst)], 1);
  EXPECT_EQ(steps[1].axis, "shard");

  // An op of a queue waits for a thread: so does whatever is filled in behind it, though no bytes say so.
  program.ops[1].stream = Stream::host;
  program.ops.insert(program.ops.begin() + 2, {.kind = &find_kind("gelu"), .stream = Stream::compute});
  const std::vector<std::vector<Wait>> threads{{}, {{kFirst, 1}}, {{Stream::host, 1}}, {}};
  const auto second = [&](bool queues) {
    return exchanges_of(program, threads, [&](Stream s) { return queues && s != Stream::host; })[1];
  };
  EXPECT_EQ(second(false).after[size_t(kFirst)], 0);
  EXPECT_EQ(second(true).after[size_t(kFirst)], 1);

  EXPECT_EQ(text_of(exchanges_from(text_of(steps))), text_of(steps));
  EXPECT_THROW(exchanges_from("[[1, 2]]"), Error);
}

// Runs a job on real groups, a thread a rank and stream; each exchange is a barrier of its group.
void run(const std::vector<RankExchanges>& ranks) {
  run_local(int(ranks.size()), [&](World& world) {
    const RankExchanges& mine = ranks[size_t(world.rank())];
    std::array<std::map<std::string, std::unique_ptr<Communicator>>, kStreams> groups;
    for (Stream stream : {kFirst, kSecond})
      for (const Axis& axis : mine.mesh.axes())
        groups[size_t(stream)][axis.name] = world.group(axis.name + std::string(name_of(stream)), axis.members);
    std::array<std::atomic<int32_t>, kStreams> ended{};
    std::vector<std::jthread> threads;
    for (Stream stream : {kFirst, kSecond})
      threads.emplace_back([&, stream] {
        for (const ExchangeStep& step : mine.steps) {
          if (step.stream != stream) continue;
          for (size_t s = 0; s < size_t(kStreams); ++s)
            for (int32_t now; (now = ended[s]) < step.after[s];) ended[s].wait(now);
          groups[size_t(stream)][step.axis]->barrier();
          ++ended[size_t(stream)];
          ended[size_t(stream)].notify_all();
        }
      });
  });
}

// Steps that all ranks make alike, each waiting for some of those before it.
std::vector<ExchangeStep> random_steps(std::mt19937& random, const Mesh::Sizes& sizes) {
  const auto below = [&](size_t n) { return size_t(random() % n); };
  std::vector<ExchangeStep> steps;
  std::array<int32_t, kStreams> made{};
  for (size_t i = 4 + below(12); i-- > 0;) {
    ExchangeStep step = step_of("exchange of " + std::to_string(below(5)) + " bytes", sizes[below(sizes.size())].axis,
                                below(2) ? kFirst : kSecond);
    for (Stream stream : {kFirst, kSecond})
      step.after[size_t(stream)] = int32_t(below(size_t(made[size_t(stream)]) + 1));
    step.after[size_t(step.stream)] = made[size_t(step.stream)]++;
    steps.push_back(step);
  }
  return steps;
}

// Numbers the steps of each stream anew; what was to end before still does as far as there is as much.
void renumber(std::vector<ExchangeStep>& steps) {
  std::array<int32_t, kStreams> made{};
  for (ExchangeStep& step : steps) {
    for (size_t s = 0; s < made.size(); ++s) step.after[s] = std::min(step.after[s], made[s]);
    step.after[size_t(step.stream)] = made[size_t(step.stream)]++;
  }
}

TEST(Agreement, OneExchangeSwappedDroppedOrChangedIsRefused) {
  const std::vector<Mesh::Sizes> meshes{{{"shard", 2}},
                                        {{"replicate", 2}, {"shard", 2}},
                                        {{"replicate", 3}, {"shard", 2}},
                                        {{"pipeline", 2, true}, {"shard", 2}, {"tensor", 2}}};
  std::mt19937 random(11);
  const auto below = [&](size_t n) { return size_t(random() % n); };
  int changes = 0;
  for (int n = 0; n < 400; ++n) {
    const Mesh::Sizes& sizes = meshes[below(meshes.size())];
    const std::vector<RankExchanges> right = job_of(sizes, random_steps(random, sizes));
    ASSERT_EQ(verdict(right), "") << n;
    std::vector<RankExchanges> wrong = right;
    std::vector<ExchangeStep>& steps = wrong[below(wrong.size())].steps;
    const size_t at = below(steps.size());
    switch (below(3)) {
      case 0:
        steps.erase(steps.begin() + int64_t(at));
        break;
      case 1:
        steps[at].what += ", twice";
        break;
      default: {  // with the next one of its group, if that is another one
        const auto of_group = [&](const ExchangeStep& step) {
          return step.axis == steps[at].axis && step.stream == steps[at].stream;
        };
        const auto other = std::find_if(steps.begin() + int64_t(at) + 1, steps.end(), of_group);
        if (other == steps.end() || other->what == steps[at].what) continue;
        std::swap(other->what, steps[at].what);
      }
    }
    renumber(steps);
    EXPECT_NE(verdict(wrong), "") << n;
    ++changes;
  }
  EXPECT_GT(changes, 250);
}

// Ranks that make exchanges of different groups in another order, or wait in another way: what is accepted ends.
TEST(Agreement, WhatIsAcceptedEnds) {
  const Mesh::Sizes sizes{{"replicate", 2}, {"shard", 2}};
  std::mt19937 random(12);
  int accepted = 0, refused = 0;
  for (int n = 0; n < 150; ++n) {
    std::vector<RankExchanges> ranks = job_of(sizes, random_steps(random, sizes));
    for (RankExchanges& rank : ranks)
      for (size_t i = 0; i + 1 < rank.steps.size(); ++i)
        if (random() % 4 == 0 &&
            (rank.steps[i].axis != rank.steps[i + 1].axis || rank.steps[i].stream != rank.steps[i + 1].stream))
          std::swap(rank.steps[i], rank.steps[i + 1]);
    for (RankExchanges& rank : ranks) renumber(rank.steps);
    if (!verdict(ranks).empty()) {
      ++refused;
      continue;
    }
    ++accepted;
    run(ranks);
  }
  EXPECT_GT(accepted, 10);
  EXPECT_GT(refused, 10);
}

}  // namespace
}  // namespace strata::agreement_test
