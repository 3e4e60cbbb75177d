// Schedules against their papers: bubbles and memory on the virtual clock, exactly.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "engine/program/registering.h"
#include "plugins/pipeline/schedules_to_test.h"

namespace strata::pipeline {
namespace {

// Whole units of time, so that sums are exact.
TEST(PipelineSchedules, HaveTheirPublishedBubbles) {
  each_problem(
      {1, 2, 3, 4, 7, 8, 16, 64}, {1, 2, 3, 8, 16, 31, 64, 127, 512},
      [](const Named& schedule, const Problem& problem) {
        const int P = problem.stages, V = problem.chunks, M = problem.microbatches;
        const bool begins_earlier =
            schedule.name == std::string("zero_bubble_h2") || schedule.name == std::string("zero_bubble_v");
        if (M < (begins_earlier ? 2 * P - 1 : P)) return;
        const Timing timing = clock(problem, actions_of(problem, schedule.make(problem)));
        // A chunk takes 3 for a microbatch; waits are those of chunks, of 3, or a third of it.
        const int bubble = begins_earlier ? 0 : schedule.name == std::string("zero_bubble_h1") ? P - 1 : 3 * (P - 1);
        EXPECT_EQ(timing.span(), 3 * V * M + bubble);
        EXPECT_EQ(timing.makespan, 3 * V * M + (begins_earlier ? P - 1 : bubble));
        for (const StageTime& stage : timing.stages) EXPECT_EQ(stage.busy, 3 * V * M);
      });
}

// As the paper has it for any three times: (P - 1)(F + B - W), and (P - 1)(F + B - 2 W). It holds where no stage waits
// for anything but the first and last of the chain of gradients: with B as long as F, and W no longer.
TEST(PipelineSchedules, ZeroBubblesOfOtherTimes) {
  for (const auto& [F, W] : {std::pair{4, 4}, {4, 3}, {6, 3}, {8, 7}})
    for (int P : {2, 4, 8}) {
      SCOPED_TRACE(std::to_string(P) + " stages, " + std::to_string(F) + " and " + std::to_string(W));
      Problem problem{.stages = P, .microbatches = 4 * P};
      problem.costs.assign(size_t(P),
                           {.forward = double(F), .input_gradient = double(F), .weight_gradient = double(W)});
      const int busy = (2 * F + W) * 4 * P;
      EXPECT_EQ(clock(problem, actions_of(problem, zero_bubble_h1(problem))).span(), busy + (P - 1) * (2 * F - W));
      EXPECT_EQ(clock(problem, actions_of(problem, zero_bubble_h2(problem))).span(), busy + (P - 1) * (2 * F - 2 * W));
    }
}

// Steps that follow each other, each stage by itself, take a span each: the same times again a span later do.
TEST(PipelineSchedules, StepsOverlap) {
  for (int stages : {2, 5, 8}) {
    for (const Named& schedule : kSchedules) {
      const Problem problem{.stages = stages, .chunks = schedule.chunks.back(), .microbatches = 2 * stages};
      const Schedule made = schedule.make(problem);
      const Timing one = clock(problem, actions_of(problem, made)), four = clock(problem, actions_of(problem, made, 4));
      EXPECT_LE(four.makespan, one.makespan + 3 * one.span()) << schedule.name;
    }
  }
}

TEST(PipelineSchedules, KeepWhatTheirPapersSay) {
  for (int P : {1, 2, 3, 4, 8, 64}) {
    const int M = 4 * P;
    SCOPED_TRACE(P);
    const auto peaks = [&](Schedule (*make)(const Problem&), int chunks) {
      const Problem problem{.stages = P, .chunks = chunks, .microbatches = M};
      const Schedule schedule = make(problem);
      std::vector<int> counts;
      for (const StageTime& stage : clock(problem, actions_of(problem, schedule)).stages)
        counts.push_back(stage.peak_count);
      EXPECT_EQ(peak_bytes(problem, schedule), std::vector<int64_t>(counts.begin(), counts.end()));  // of one byte each
      return counts;
    };
    const auto expected = [&](const std::function<int(int)>& of_stage) {
      std::vector<int> all;
      for (int p = 0; p < P; ++p) all.push_back(of_stage(p));
      return all;
    };
    EXPECT_EQ(peaks(gpipe, 1), expected([&](int) { return M; }));
    EXPECT_EQ(peaks(one_forward_one_backward, 1), expected([&](int p) { return P - p; }));
    EXPECT_EQ(peaks(interleaved, 4), expected([&](int p) { return std::min(4 * M, 2 * (P - 1 - p) + 3 * P + 1); }));
    EXPECT_EQ(peaks(breadth_first, 4), expected([&](int) { return 4 * M; }));
    EXPECT_EQ(peaks(zero_bubble_h1, 1), expected([&](int) { return P; }));
    EXPECT_EQ(peaks(zero_bubble_h2, 1), expected([&](int) { return 2 * P - 1; }));
    EXPECT_EQ(peaks(zero_bubble_v, 2), expected([&](int) { return 2 * P; }));
  }
}

// Bytes: what a weight gradient needs stays after the input gradient, which may make more than it frees.
TEST(PipelineSchedules, CountBytesByPart) {
  Problem problem{.stages = 1, .microbatches = 2};
  problem.costs = {{.activation = 10, .weight_activation = 4}};
  const auto peak = [&](std::vector<Pass> order) {
    return peak_bytes(problem, {.stage_of = {0}, .order = {order}})[0];
  };
  EXPECT_EQ(peak({forward_pass(0, 0), backward_pass(0, 0), forward_pass(0, 1), backward_pass(0, 1)}), 10);
  EXPECT_EQ(peak({forward_pass(0, 0), input_gradient(0, 0), forward_pass(0, 1), weight_gradient(0, 0)}), 14);
  problem.costs[0].weight_activation = 13;
  EXPECT_EQ(peak({forward_pass(0, 0), input_gradient(0, 0), weight_gradient(0, 0), forward_pass(0, 1)}), 13);
}

// Gradients are summed in the order of passes: that of microbatches, as on one rank.
TEST(PipelineSchedules, TakeMicrobatchesInOrder) {
  each_problem({1, 2, 3, 4, 8}, {1, 2, 3, 4, 5, 7, 8, 12, 13}, [](const Named& schedule, const Problem& problem) {
    for (const auto& order : schedule.make(problem).order) {
      std::vector<std::array<int, 4>> next(size_t(problem.chunks), {0, 0, 0, 0});
      for (const Pass& pass : order) EXPECT_EQ(pass.microbatch, next[size_t(pass.chunk)][size_t(pass.part)]++);
    }
  });
}

// Of a step among many.
double period(const Problem& problem, const Schedule& schedule) {
  return clock(problem, actions_of(problem, schedule, 9)).makespan -
         clock(problem, actions_of(problem, schedule, 8)).makespan;
}

TEST(PipelineSchedules, WithoutFlushThereIsNoBubble) {
  for (int P : {1, 2, 3, 4, 8, 64})
    for (int M : {P, P + 1, 2 * P, 4 * P}) {
      if (P == 64 && M > P) continue;
      const Problem problem{.stages = P, .microbatches = M};
      SCOPED_TRACE(text_of(problem));
      for (auto make : {pipedream, two_buffered_weights}) {
        EXPECT_EQ(period(problem, make(problem)), 3 * M);
        const Timing timing = clock(problem, actions_of(problem, make(problem), 4));
        for (int p = 0; p < P; ++p) EXPECT_EQ(timing.stages[size_t(p)].peak_count, P - p);
      }
    }
}

// Of 2bw with fewer microbatches than reach from the first stage to the last.
TEST(PipelineSchedules, WithFewMicrobatchesThereIsHalfABubble) {
  for (int P : {3, 4, 8, 64})
    for (int M : {1, P / 2, P - 2}) {
      const Problem problem{.stages = P, .microbatches = M};
      SCOPED_TRACE(text_of(problem));
      EXPECT_EQ(period(problem, two_buffered_weights(problem)), 3 * M + 3 * ((P - 1) / 2));
      for (const StageTime& stage : clock(problem, actions_of(problem, two_buffered_weights(problem), 4)).stages)
        EXPECT_LE(stage.peak_count, M + P);
    }
}

TEST(PipelineSchedules, WithoutFlushTheyCanRunFromTheFirstStepOn) {
  for (int P : {1, 2, 3, 4, 5, 8})
    for (int M = 1; M <= 18; ++M)
      for (auto make : {pipedream, two_buffered_weights}) {
        const Problem problem{.stages = P, .microbatches = M};
        SCOPED_TRACE(text_of(problem));
        Schedule schedule;
        const std::string refused = refusal([&] { schedule = make(problem); });
        EXPECT_EQ(refused.empty(), make == two_buffered_weights || M >= P);
        if (!refused.empty()) continue;
        const Actions actions = actions_of(problem, schedule, 4);
        ASSERT_EQ(refusal([&] { require_no_deadlock(actions); }), "");
        ASSERT_EQ(refusal([&] { require_agreement(job_of(actions)); }), "");
        EXPECT_EQ(refusal([&] { clock(problem, actions, Sends::waiting); }), "");
      }
  EXPECT_EQ(refusal([] { pipedream({.stages = 4, .microbatches = 2}); }),
            "schedule pipedream over 4 stages needs at least 4 microbatches a step, and there are 2. Make "
            "data.micro_batch smaller or data.global_batch larger.");
}

// What a step leaves, the next one runs; and an update is of as many microbatches as a step has.
TEST(PipelineSchedules, WithoutFlushAStepRunsAsManyPassesAsItLeaves) {
  const Problem problem{.stages = 4, .microbatches = 6};
  for (auto make : {pipedream, two_buffered_weights}) {
    const Schedule schedule = make(problem);
    for (size_t s = 0; s < 4; ++s) {
      int backwards = 0, begun = 0;
      for (const Pass& pass : schedule.order[s])
        if (pass.part == Pass::Part::backward) ++backwards, begun += pass.microbatch < 0;
      EXPECT_EQ(backwards, 6);
      EXPECT_EQ(begun, 3 - int(s));
      EXPECT_EQ(schedule.first[s].size(), size_t(12 - begun));
    }
  }
}

TEST(PipelineSchedules, OtherChunksAreRefused) {
  EXPECT_EQ(
      refusal([] { gpipe({.stages = 2, .chunks = 2, .microbatches = 4}); }),
      "schedule gpipe has 1 chunk a stage, not 2. Set chunks = 1, or take a schedule for any number (interleaved, "
      "breadth_first).");
  EXPECT_EQ(refusal([] { zero_bubble_v({.stages = 2, .chunks = 1, .microbatches = 4}); }),
            "schedule zero_bubble_v has 2 chunks a stage, not 1. Set chunks = 2, or take a schedule for any number "
            "(interleaved, breadth_first).");
}

TEST(PipelineSchedules, AreFoundByName) {
  const RegisteringPlugin as("pipeline");
  register_schedules();
  register_schedules();  // as a plugin that is made twice
  for (const Named& schedule : kSchedules) {
    const Problem problem{.stages = 3, .chunks = schedule.chunks.back(), .microbatches = 6};
    EXPECT_EQ(peak_bytes(problem, find_schedule(schedule.name).make(problem)),
              peak_bytes(problem, schedule.make(problem)));
  }
  EXPECT_EQ(refusal([] { find_schedule("interleave"); }),
            "no schedule is named \"interleave\". Did you mean \"interleaved\"?");
}

TEST(PipelineSchedules, ChunksLieInRoundsOrZigzag) {
  EXPECT_EQ(round_robin(3, 2), (std::vector<int>{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(zigzag(3, 3), (std::vector<int>{0, 1, 2, 2, 1, 0, 0, 1, 2}));
}

}  // namespace
}  // namespace strata::pipeline
