// What ranks compare before the first step: each difference is told on all ranks, with the ranks that differ.
#include "engine/runtime/ranks.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <mutex>
#include <set>

#include "strata/error.h"

namespace strata::ranks_test {
namespace {

// The one message that all ranks end with; "" when none does.
std::string outcome(int ranks, const std::function<void(World&)>& compare) {
  std::set<std::string> messages;
  std::mutex mutex;
  run_local(ranks, [&](World& world) {
    std::string message;
    try {
      compare(world);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage);
      message = error.what();
    }
    std::lock_guard lock(mutex);
    messages.insert(message);
  });
  EXPECT_EQ(messages.size(), 1u);
  return *messages.begin();
}

TEST(RanksNamed, WithTheirStagesWhereProgramsDiffer) {
  const Mesh mesh(0, {{"pipeline", 3, true}, {"shard", 2}});
  const auto named = [&](const std::string& text) { return with_stages(text, mesh); };
  EXPECT_EQ(named("rank 3 is gone"), "rank 3 (pipeline stage 1) is gone");
  EXPECT_EQ(named("ranks 0, 2 and 5 did not come within 3 s"),
            "ranks 0 (pipeline stage 0), 2 (pipeline stage 1) and 5 (pipeline stage 2) did not come within 3 s");
  EXPECT_EQ(named("send to rank 1: rank 12 of Frank 1, ranks"),
            "send to rank 1 (pipeline stage 0): rank 12 of Frank 1, ranks");
  EXPECT_EQ(with_stages("rank 1 is gone", Mesh(0, {{"shard", 2}})), "rank 1 is gone");
}

// The first difference of the first rank that differs.
TEST(RanksAgree, OnSettings) {
  const Settings common{{"run.seed", "1337"}, {"run.steps", "100"}, {"network.address", "\"\"", true}};
  const auto changed = [&](std::map<int, Settings> others) {
    return outcome(4, [&, others](World& world) {
      const auto found = others.find(world.rank());
      require_same_settings(world, found == others.end() ? common : found->second);
    });
  };
  Settings other = common;
  EXPECT_EQ(changed({}), "");
  other[2].value = "\"10.0.0.7\"";
  EXPECT_EQ(changed({{1, other}}), "");
  other[1].value = "90";
  EXPECT_EQ(changed({{3, other}}),
            "ranks have different configurations: run.steps = 100 on rank 0 and = 90 on rank 3; start all ranks with "
            "one configuration.");
  Settings seed = other;
  seed[0].value = "7";
  EXPECT_NE(changed({{2, seed}, {3, other}}).find("run.seed = 1337 on rank 0 and = 7 on rank 2;"), std::string::npos);
  Settings more = common;
  more.push_back({"plugins.clip.max_norm", "1"});
  EXPECT_NE(changed({{1, more}}).find("plugins.clip.max_norm is not set on rank 0 and = 1 on rank 1;"),
            std::string::npos);
  EXPECT_NE(changed({{0, more}}).find("plugins.clip.max_norm = 1 on rank 0 and is not set on rank 1;"),
            std::string::npos);
}

TEST(RanksAgree, OnTheStep) {
  EXPECT_EQ(outcome(3, [](World& world) { require_same_start(world, 7); }), "");
  EXPECT_NE(outcome(3, [](World& world) { require_same_start(world, world.rank() == 2 ? 5 : 7); })
                .find("rank 0 begins after step 7, rank 2 after step 5"),
            std::string::npos);
}

// Told on all ranks, with exit code 1: no configuration brings it about.
TEST(RanksAgree, OnWhatTheyExchange) {
  const auto said = [](const std::function<std::string(int)>& what) {
    std::set<std::string> messages;
    std::mutex mutex;
    run_local(4, [&](World& world) {
      const std::vector<ExchangeStep> steps{{what(world.rank()), "shard", Stream::exchange, {}}};
      std::string message;
      try {
        require_same_exchanges(world, Mesh(world.rank(), {{"replicate", 2}, {"shard", 2}}), steps);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::failed);
        message = error.what();
      }
      std::lock_guard lock(mutex);
      messages.insert(message);
    });
    EXPECT_EQ(messages.size(), 1u);
    return *messages.begin();
  };
  EXPECT_EQ(said([](int) { return "a"; }), "");
  EXPECT_EQ(said([](int rank) { return rank < 2 ? "a" : "b"; }), "");  // other groups may do other things
  EXPECT_NE(said([](int rank) { return rank == 2 ? "a" : "b"; }).find("ranks make different exchanges over the axis"),
            std::string::npos);
}

TEST(RanksAgree, OnThreads) {
  std::string note;
  std::mutex mutex;
  const auto smallest = [&](std::vector<int> threads) {
    std::set<int> found;
    run_local(int(threads.size()), [&](World& world) {
      std::string own;
      const int least = smallest_of_ranks(world, threads[size_t(world.rank())], own);
      std::lock_guard lock(mutex);
      found.insert(least);
      note = own;
    });
    EXPECT_EQ(found.size(), 1u);
    return *found.begin();
  };
  EXPECT_EQ(smallest({4, 4, 4}), 4);
  EXPECT_EQ(note, "");
  EXPECT_EQ(smallest({4, 2, 16}), 2);
  EXPECT_EQ(note.find("ranks have 2 to 16 processors; all compute with 2 threads"), 0u) << note;
}

TEST(RanksAgree, ThreadsBeyondTheProcessorsAreTold) {
  EXPECT_EQ(too_many_threads(4, 1, 4), "");
  EXPECT_EQ(too_many_threads(2, 2, 4), "");
  EXPECT_EQ(too_many_threads(1, 8, 2), "");   // ranks cannot have fewer
  EXPECT_EQ(too_many_threads(64, 1, 0), "");  // nobody knows
  EXPECT_EQ(too_many_threads(4096, 1, 2),
            "1 rank computes with 4096 threads on 2 processors; threads wait for each other, so this is slower than "
            "device.threads = 2.");
  EXPECT_EQ(too_many_threads(3, 4, 8).substr(0, 66),
            "4 ranks of this host compute with 3 threads each on 8 processors; ");
}

TEST(RanksAgree, OnTheData) {
  EXPECT_EQ(outcome(3, [](World& world) { require_same_plan(world, "", "10 tokens"); }), "");
  EXPECT_NE(outcome(3, [](World& world) { require_same_plan(world, "", world.rank() == 1 ? "9 tokens" : "10 tokens"); })
                .find("rank 0 has 10 tokens, rank 1 has 9 tokens"),
            std::string::npos);
}

}  // namespace
}  // namespace strata::ranks_test
