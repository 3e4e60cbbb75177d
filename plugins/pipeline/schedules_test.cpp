// Schedules against their papers: bubbles and memory on the virtual clock, exactly; every order is one that can run;
// and the check of sends and receives against thousands of orders that cannot.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "comm/world.h"
#include "engine/planning/agreement.h"
#include "engine/program/registering.h"
#include "plugins/pipeline/actions.cpp"  // a plugin's code is not in the engine's library
#include "plugins/pipeline/clock.cpp"
#include "plugins/pipeline/schedules/1f1b.cpp"
#include "plugins/pipeline/schedules/2bw.cpp"
#include "plugins/pipeline/schedules/breadth_first.cpp"
#include "plugins/pipeline/schedules/gpipe.cpp"
#include "plugins/pipeline/schedules/interleaved.cpp"
#include "plugins/pipeline/schedules/pipedream.cpp"
#include "plugins/pipeline/schedules/schedules.cpp"
#include "plugins/pipeline/schedules/zero_bubble.cpp"
#include "plugins/pipeline/schedules/zero_bubble_h.cpp"
#include "plugins/pipeline/schedules/zero_bubble_v.cpp"

namespace strata::pipeline {
namespace {

struct Named {
  const char* name;
  Schedule (*make)(const Problem&);
  std::vector<int> chunks;
};
const std::vector<Named> kSchedules = {
    {"gpipe", gpipe, {1}},
    {"1f1b", one_forward_one_backward, {1}},
    {"interleaved", interleaved, {1, 2, 3, 4}},
    {"breadth_first", breadth_first, {1, 2, 3, 4}},
    {"zero_bubble_h1", zero_bubble_h1, {1}},
    {"zero_bubble_h2", zero_bubble_h2, {1}},
    {"zero_bubble_v", zero_bubble_v, {2}},
};

std::string text_of(const Problem& p) {
  return std::to_string(p.stages) + " stages, " + std::to_string(p.chunks) + " chunks, " +
         std::to_string(p.microbatches) + " microbatches";
}

void each_problem(const std::vector<int>& stages, const std::vector<int>& microbatches,
                  const std::function<void(const Named&, const Problem&)>& what) {
  for (const Named& schedule : kSchedules)
    for (int chunks : schedule.chunks)
      for (int s : stages)
        for (int m : microbatches) {
          const Problem problem{.stages = s, .chunks = chunks, .microbatches = m};
          SCOPED_TRACE(std::string(schedule.name) + ", " + text_of(problem));
          what(schedule, problem);
        }
}

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

// What a stage brings to the engine's check of real programs (engine/planning/agreement.h).
std::vector<RankExchanges> job_of(const Actions& actions) {
  std::vector<RankExchanges> job;
  for (int stage = 0; stage < actions.stages(); ++stage) {
    RankExchanges rank{Mesh(stage, {{"pipeline", actions.stages()}}), {}};
    std::vector<int32_t> place(2 * size_t(actions.chunks()) * size_t(actions.microbatches), INT32_MAX);
    int32_t received = 0, needed = 0;
    for (const Action& action : actions.by_stage[size_t(stage)]) {
      const Message need = actions.needed(stage, action.pass);
      if (action.kind == Action::Kind::run) {
        if (need.chunk >= 0) needed = std::max(needed, place[actions.index(need)]);
        continue;
      }
      const bool sends = action.kind == Action::Kind::send;
      ExchangeStep step{.what = text(sends ? actions.made(stage, action.pass) : need),
                        .axis = "pipeline",
                        .stream = sends ? Stream::send : Stream::receive,
                        .offset = action.peer - stage};
      step.after[size_t(Stream::receive)] = needed;
      if (!sends) place[actions.index(need)] = ++received;
      rank.steps.push_back(step);
    }
    job.push_back(std::move(rank));
  }
  return job;
}

std::string refusal(const std::function<void()>& of) {
  try {
    of();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// All small problems: the passes are right, all stages come to their end where sends wait, and the engine's check of
// programs says so too.
TEST(PipelineSchedules, CanAllRun) {
  std::vector<int> microbatches;
  for (int m = 1; m <= 20; ++m) microbatches.push_back(m);
  each_problem({1, 2, 3, 4, 5, 8}, microbatches, [](const Named& schedule, const Problem& equal) {
    for (const bool uneven : {false, true}) {
      Problem problem = equal;
      for (int g = 0; uneven && g < problem.all_chunks(); ++g)
        problem.costs.push_back({double(1 + g * 7 % 5), double(2 + g * 3 % 4), double(g % 3)});
      const Actions actions = actions_of(problem, schedule.make(problem));
      ASSERT_EQ(refusal([&] { require_no_deadlock(actions); }), "");
      ASSERT_EQ(refusal([&] { require_agreement(job_of(actions)); }), "");
      problem.crossing = 0.5;
      const double buffered = clock(problem, actions).makespan;
      EXPECT_GE(clock(problem, actions, Sends::waiting).makespan, buffered);
    }
  });
}

// Random changes of orders of passes.
TEST(PipelineSchedules, MutatedPassesAreRefusedOrEnd) {
  std::mt19937 random(18);
  const auto below = [&](size_t n) { return size_t(random() % n); };
  int wrong = 0, never_end = 0, right = 0;
  for (int round = 0; round < 6000; ++round) {
    const Named& named = kSchedules[below(kSchedules.size())];
    const Problem problem{.stages = 2 + int(below(4)),
                          .chunks = named.chunks[below(named.chunks.size())],
                          .microbatches = 1 + int(below(8))};
    SCOPED_TRACE(std::string(named.name) + ", " + text_of(problem) + ", round " + std::to_string(round));
    Schedule schedule = named.make(problem);
    bool dropped = false;
    for (size_t n = 1 + below(3); n-- > 0;) {
      auto& order = schedule.order[below(schedule.order.size())];
      const size_t a = below(order.size()), b = below(order.size());
      switch (below(4)) {
        case 0:
          std::swap(order[a], order[std::min(a + 1, order.size() - 1)]);
          break;
        case 1:
          std::swap(order[a], order[b]);
          break;
        case 2:
          if (a < b)
            std::rotate(order.begin() + int64_t(a), order.begin() + int64_t(a) + 1, order.begin() + int64_t(b));
          if (b < a)
            std::rotate(order.begin() + int64_t(b), order.begin() + int64_t(a), order.begin() + int64_t(a) + 1);
          break;
        default:
          if (order.size() > 1 && below(4) == 0) order.erase(order.begin() + int64_t(a)), dropped = true;
      }
    }
    Actions actions;
    const std::string illegal = refusal([&] { actions = actions_of(problem, schedule); });
    EXPECT_TRUE(!dropped || !illegal.empty());
    if (!illegal.empty()) {
      ++wrong;
      continue;
    }
    const std::string refused = refusal([&] { require_no_deadlock(actions); });
    for (Sends sends : {Sends::buffered, Sends::waiting})
      EXPECT_EQ(refusal([&] { clock(problem, actions, sends); }).empty(), refused.empty()) << refused;
    EXPECT_EQ(refusal([&] { require_agreement(job_of(actions)); }).empty(), refused.empty()) << refused;
    ++(refused.empty() ? right : never_end);
  }
  EXPECT_GT(wrong, 300);
  EXPECT_GT(never_end, 300);
  EXPECT_GT(right, 300);
}

// Real ranks do what the actions say: a thread for passes, one for sends, one for receives. A send waits for its
// receiver.
class Rank {
 public:
  Rank(const Actions& actions, World& world)
      : actions_(actions), stage_(world.rank()), list_(actions.by_stage[size_t(stage_)]) {
    std::set<std::pair<int, int>> pairs;  // sender and receiver
    for (int stage = 0; stage < actions.stages(); ++stage)
      for (const Action& action : actions.by_stage[size_t(stage)])
        if (action.kind == Action::Kind::send) pairs.insert({stage, action.peer});
    for (const auto& [from, to] : pairs)
      if (from == stage_ || to == stage_)
        groups_[{from, to}] =
            world.group(std::to_string(from) + " to " + std::to_string(to), {std::min(from, to), std::max(from, to)});
  }

  void run() {
    std::jthread sends([&] { exchange(Action::Kind::send); });
    std::jthread receives([&] { exchange(Action::Kind::receive); });
    int32_t needed = 0, counted = 0;  // receives that have ended before the pass
    std::vector<int32_t> place(2 * size_t(actions_.chunks()) * size_t(actions_.microbatches), 0);
    for (const Action& action : list_) {
      const Message need = actions_.needed(stage_, action.pass);
      if (action.kind == Action::Kind::receive) place[actions_.index(need)] = ++counted;
      if (action.kind == Action::Kind::run && need.chunk >= 0) needed = std::max(needed, place[actions_.index(need)]);
      for (int32_t now; (now = ended_) < needed;) ended_.wait(now);
      ++come_;
      come_.notify_all();
    }
  }

 private:
  // Actions of a kind in their order, each when the passes before it have ended.
  void exchange(Action::Kind kind) {
    for (size_t i = 0; i < list_.size(); ++i) {
      if (list_[i].kind != kind) continue;
      for (int32_t now; (now = come_) < int32_t(i);) come_.wait(now);
      const bool sends = kind == Action::Kind::send;
      const int peer = list_[i].peer;
      const Message message = sends ? actions_.made(stage_, list_[i].pass) : actions_.needed(stage_, list_[i].pass);
      Communicator& pair = *groups_.at(sends ? std::pair(stage_, peer) : std::pair(peer, stage_));
      int64_t number = sends ? int64_t(actions_.index(message)) : -1;
      const Pieces data{{reinterpret_cast<std::byte*>(&number), sizeof number}};
      const int other = stage_ < peer ? 1 : 0;  // in the group
      sends ? pair.send(data, other) : pair.receive(data, other);
      pair.barrier();
      EXPECT_EQ(number, int64_t(actions_.index(message)));
      if (!sends) ++ended_, ended_.notify_all();
    }
  }

  const Actions& actions_;
  int stage_;
  const std::vector<Action>& list_;
  std::map<std::pair<int, int>, std::unique_ptr<Communicator>> groups_;
  std::atomic<int32_t> come_ = 0, ended_ = 0;  // actions that the thread of passes has come past; receives
};

TEST(PipelineSchedules, WhatIsAcceptedEndsOnRealRanks) {
  std::mt19937 random(22);
  const auto below = [&](size_t n) { return size_t(random() % n); };
  int accepted = 0;
  for (int round = 0; accepted < 60; ++round) {
    const Named& named = kSchedules[below(kSchedules.size())];
    const Problem problem{.stages = 2 + int(below(4)),
                          .chunks = named.chunks[below(named.chunks.size())],
                          .microbatches = 1 + int(below(8))};
    Schedule schedule = named.make(problem);
    for (size_t n = below(4); n-- > 0;) {
      auto& order = schedule.order[below(schedule.order.size())];
      const size_t a = below(order.size());
      std::swap(order[a], order[std::min(a + 1, order.size() - 1)]);
    }
    Actions actions;
    if (!refusal([&] { require_no_deadlock(actions = actions_of(problem, schedule)); }).empty()) continue;
    SCOPED_TRACE(std::string(named.name) + ", " + text_of(problem) + ", round " + std::to_string(round));
    run_local(
        problem.stages, [&](World& world) { Rank(actions, world).run(); }, 20);
    ++accepted;
  }
}

// Random changes of sends and receives, the passes being right.
TEST(PipelineSchedules, MutatedSendsAndReceivesAreRefusedOrEnd) {
  std::mt19937 random(19);
  const auto below = [&](size_t n) { return size_t(random() % n); };
  int other = 0, never_end = 0, right = 0;
  for (int round = 0; round < 6000; ++round) {
    const Named& named = kSchedules[below(kSchedules.size())];
    const Problem problem{.stages = 2 + int(below(4)),
                          .chunks = named.chunks[below(named.chunks.size())],
                          .microbatches = 1 + int(below(8))};
    SCOPED_TRACE(std::string(named.name) + ", " + text_of(problem) + ", round " + std::to_string(round));
    Actions actions = actions_of(problem, named.make(problem));
    for (size_t n = 1 + below(2); n-- > 0;) {
      auto& list = actions.by_stage[below(actions.by_stage.size())];
      std::vector<size_t> exchanges;
      for (size_t i = 0; i < list.size(); ++i)
        if (list[i].kind != Action::Kind::run) exchanges.push_back(i);
      const size_t which = below(exchanges.size()), a = exchanges[which];
      const auto at = [&](size_t i) { return list.begin() + int64_t(i); };
      switch (below(4)) {
        case 0:
          std::swap(list[a], list[exchanges[std::min(which + 1, exchanges.size() - 1)]]);
          break;
        case 1: {  // later or earlier among the passes
          const size_t b = std::min(list.size() - 1, a + below(6));
          std::rotate(at(a), at(a) + 1, at(b) + 1);
          break;
        }
        case 2: {
          const size_t b = a - std::min(a, below(6));
          std::rotate(at(b), at(a), at(a) + 1);
          break;
        }
        default:
          if (below(4) == 0) list.erase(at(a));
      }
    }
    const std::string refused = refusal([&] { require_no_deadlock(actions); });
    const std::string stands = refusal([&] { clock(problem, actions, Sends::waiting); });
    if (refused.empty()) {
      EXPECT_EQ(stands, "");
      EXPECT_EQ(refusal([&] { require_agreement(job_of(actions)); }), "");
    } else if (refused.find("would never end") != std::string::npos) {
      EXPECT_NE(stands, "") << refused;
      ++never_end;
      continue;
    }
    ++(refused.empty() ? right : other);
  }
  EXPECT_GT(other, 300);
  EXPECT_GT(never_end, 50);
  EXPECT_GT(right, 300);
}

// Each stage sends the other first what that needs last.
TEST(PipelineSchedules, TheCircleIsTold) {
  const Problem problem{.stages = 2, .microbatches = 2};
  Schedule schedule = one_forward_one_backward(problem);
  std::swap(schedule.order[0][1], schedule.order[0][2]);  // backward of microbatch 0 before the forward of 1
  schedule.order[1] = gpipe(problem).order[1];
  EXPECT_EQ(
      refusal([&] { require_no_deadlock(actions_of(problem, schedule)); }),
      "the schedule would never end: stage 0: backward of chunk 0, microbatch 0; which waits for stage 0: receive "
      "of the gradient of chunk 0, microbatch 0 from stage 1; which waits for stage 1: backward of chunk 0, "
      "microbatch 0; which waits for stage 1: forward of chunk 0, microbatch 1; which waits for stage 1: receive "
      "of the input of chunk 1, microbatch 1 from stage 0; which waits for stage 0: forward of chunk 0, "
      "microbatch 1; which waits for the first.");
}

TEST(PipelineSchedules, WrongPassesAreRefused) {
  const Problem problem{.stages = 2, .microbatches = 2};
  const auto with = [&](const std::function<void(Schedule&)>& change) {
    Schedule schedule = one_forward_one_backward(problem);
    change(schedule);
    return refusal([&] { actions_of(problem, schedule); });
  };
  EXPECT_EQ(with([](Schedule&) {}), "");
  EXPECT_EQ(with([](Schedule& s) { s.order[1].pop_back(); }),
            "stage 1 never runs the input gradient of chunk 0, microbatch 1.");
  EXPECT_EQ(with([](Schedule& s) { s.order[1].push_back(s.order[1].back()); }),
            "stage 1, pass 4 of its schedule, backward of chunk 0, microbatch 1: it has run before.");
  EXPECT_EQ(with([](Schedule& s) { std::swap(s.order[1][0], s.order[1][1]); }),
            "stage 1, pass 0 of its schedule, backward of chunk 0, microbatch 0: it needs the forward of chunk 0, "
            "microbatch 0, which has not run yet.");
  EXPECT_EQ(with([](Schedule& s) { s.order[0][0].chunk = 1; }),
            "stage 0, pass 0 of its schedule, forward of chunk 1, microbatch 0: the stage has 1 chunk.");
  EXPECT_EQ(with([](Schedule& s) { s.order[0][0].microbatch = 2; }),
            "stage 0, pass 0 of its schedule, forward of chunk 0, microbatch 2: there is no such microbatch.");
  EXPECT_EQ(with([](Schedule& s) {
              s.stage_of = {0, 0};
            }),
            "the schedule does not give each of 2 stages 1 of 2 chunks and an order of passes.");
}

// Every order that a stage can have, one chunk a stage: 0 is a forward pass, 1 an input gradient, 2 a weight gradient.
using Parts = std::vector<int>;
void all_orders(int microbatches, Parts& begun, std::array<int, 3> done, std::vector<Parts>& orders) {
  if (int(begun.size()) == 3 * microbatches) return orders.push_back(begun);
  for (int part = 0; part < 3; ++part) {
    if (done[size_t(part)] == (part == 0 ? microbatches : done[size_t(part) - 1])) continue;
    begun.push_back(part);
    ++done[size_t(part)];
    all_orders(microbatches, begun, done, orders);
    --done[size_t(part)];
    begun.pop_back();
  }
}
int most_kept(const Parts& order) {
  int kept = 0, most = 0;
  for (int part : order) most = std::max(most, kept += (part == 0) - (part == 2));
  return most;
}

// The longest from a stage's first pass to its last; without end where stages wait for each other.
double span_of(const Problem& problem, const std::vector<const Parts*>& orders) {
  struct Stage {
    size_t next = 0;
    double first = -1, now = 0;
    std::array<std::vector<double>, 3> ends;  // by part
  };
  std::vector<Stage> stages(orders.size());
  for (bool went_on = true; went_on;) {
    went_on = false;
    for (size_t s = 0; s < stages.size(); ++s)
      for (Stage& at = stages[s]; at.next < orders[s]->size(); ++at.next, went_on = true) {
        const size_t part = size_t((*orders[s])[at.next]), m = at.ends[part].size();
        const Stage* from = part == 0 && s > 0                   ? &stages[s - 1]
                            : part == 1 && s + 1 < stages.size() ? &stages[s + 1]
                                                                 : nullptr;
        if (from && from->ends[part].size() <= m) break;
        if (from) at.now = std::max(at.now, from->ends[part][m] + problem.crossing);
        if (at.first < 0) at.first = at.now;
        const ChunkCost& cost = problem.cost(int(s));
        at.now += part == 0 ? cost.forward : part == 1 ? cost.input_gradient : cost.weight_gradient;
        at.ends[part].push_back(at.now);
      }
  }
  double longest = 0;
  for (size_t s = 0; s < stages.size(); ++s)
    longest = std::max(longest, stages[s].next == orders[s]->size() ? stages[s].now - stages[s].first : INFINITY);
  return longest;
}

double shortest_span(const Problem& problem) {
  std::vector<Parts> orders;
  Parts begun;
  all_orders(problem.microbatches, begun, {0, 0, 0}, orders);
  std::erase_if(orders, [&](const Parts& o) { return problem.memory > 0 && most_kept(o) > problem.memory; });
  std::vector<size_t> which(size_t(problem.stages), 0);
  double shortest = INFINITY;
  for (;;) {
    std::vector<const Parts*> chosen;
    for (size_t w : which) chosen.push_back(&orders[w]);
    shortest = std::min(shortest, span_of(problem, chosen));
    size_t s = 0;
    while (s < which.size() && ++which[s] == orders.size()) which[s++] = 0;
    if (s == which.size()) return shortest;
  }
}

// One of six times by chance for each chunk and part.
std::vector<ChunkCost> random_costs(std::mt19937& random, int chunks) {
  std::vector<ChunkCost> costs;
  for (int g = 0; g < chunks; ++g)
    costs.push_back({double(1 + random() % 6), double(1 + random() % 6), double(1 + random() % 6)});
  return costs;
}

TEST(PipelineSchedules, TheSearchFindsTheBestOrderOfSmallProblems) {
  std::mt19937 random(20);
  for (const auto& [stages, microbatches] : {std::pair{2, 1}, {2, 2}, {2, 3}, {3, 1}, {3, 2}, {3, 3}, {4, 2}})
    for (int round = 0; round < 14; ++round) {
      Problem problem{.stages = stages, .microbatches = microbatches};
      if (round > 0) problem.costs = random_costs(random, stages);
      problem.crossing = round % 3 == 2 ? 1 : 0;
      problem.memory = round % 2 == 0 ? stages : 0;
      SCOPED_TRACE(text_of(problem) + ", round " + std::to_string(round));
      EXPECT_EQ(clock(problem, actions_of(problem, zero_bubble(problem))).span(), shortest_span(problem));
    }
}

TEST(PipelineSchedules, TheSearchIsNeverWorseThanByHandOrWithMoreMemory) {
  std::mt19937 random(21);
  for (int round = 0; round < 20; ++round) {
    Problem problem{.stages = 1 + int(random() % 8), .chunks = 1 + round % 2, .microbatches = 1 + int(random() % 20)};
    if (round > 3) problem.costs = random_costs(random, problem.all_chunks());
    for (ChunkCost& cost : problem.costs) {
      cost.activation = 1 + int64_t(random() % 5);
      cost.weight_activation = 1 + int64_t(random() % 3);
    }
    problem.crossing = double(round % 3) / 2;
    SCOPED_TRACE(text_of(problem) + ", round " + std::to_string(round));
    const auto span = [&](const Schedule& made) {
      const Actions actions = actions_of(problem, made);
      EXPECT_EQ(refusal([&] { require_no_deadlock(actions); }), "");
      return clock(problem, actions).span();
    };
    const std::vector<Schedule> by_hand = problem.chunks == 2
                                              ? std::vector<Schedule>{zero_bubble_v(problem)}
                                              : std::vector<Schedule>{one_forward_one_backward(problem),
                                                                      zero_bubble_h1(problem), zero_bubble_h2(problem)};
    for (const Schedule& schedule : by_hand) {
      const std::vector<int64_t> peaks = peak_bytes(problem, schedule);
      problem.memory = *std::max_element(peaks.begin(), peaks.end());
      EXPECT_LE(span(zero_bubble(problem)), span(schedule));
    }
    double before = INFINITY;
    for (problem.memory = 1; problem.memory < 300; problem.memory += 1 + problem.memory / 3) {
      Schedule made;
      if (!refusal([&] { made = zero_bubble(problem); }).empty()) {
        EXPECT_EQ(before, INFINITY) << "less memory did";
        continue;
      }
      const std::vector<int64_t> peaks = peak_bytes(problem, made);
      EXPECT_LE(*std::max_element(peaks.begin(), peaks.end()), problem.memory);
      const double now = span(made);
      EXPECT_LE(now, before);
      before = now;
    }
    EXPECT_LT(before, INFINITY);
  }
}

// Two for which no weight gradient may begin just before an input gradient comes, or not always: 429 and 164 otherwise.
TEST(PipelineSchedules, TheSearchWaitsForInputGradients) {
  const auto span = [](int stages, int microbatches, const ChunkCost& cost) {
    Problem problem{.stages = stages, .chunks = 2, .microbatches = microbatches};
    problem.costs.assign(size_t(problem.all_chunks()), cost);
    return clock(problem, actions_of(problem, zero_bubble(problem))).span();
  };
  EXPECT_LE(span(5, 10, {9, 7, 4}), 421);
  EXPECT_LE(span(4, 5, {4, 5, 6}), 160);
}

TEST(PipelineSchedules, TheSearchSaysHowMuchMemoryWouldDo) {
  Problem problem{.stages = 3, .microbatches = 5, .memory = 99};
  problem.costs.assign(3, {.activation = 100, .weight_activation = 40});
  EXPECT_EQ(refusal([&] { zero_bubble(problem); }),
            "schedule zero_bubble would keep at least 100 bytes of activations on a stage, and there is room for 99. "
            "Raise device.memory, make data.micro_batch smaller, or take more stages.");
  problem.memory = 100;
  EXPECT_EQ(refusal([&] { zero_bubble(problem); }), "");
  problem.chunks = 3;
  EXPECT_NE(refusal([&] { zero_bubble(problem); }).find("has 2 chunks a stage, not 3"), std::string::npos);
}

// 64 stages, 512 microbatches, chunks of all sorts: what must not take long does not.
TEST(PipelineSchedules, TheSearchCanBeLarge) {
  for (int chunks : {1, 2}) {
    Problem problem{.stages = 64, .chunks = chunks, .microbatches = 512};
    for (int g = 0; g < problem.all_chunks(); ++g) problem.costs.push_back({10.0 + g % 3, 11.0 + g % 5, 7});
    const Schedule made = zero_bubble(problem);
    EXPECT_LT(clock(problem, actions_of(problem, made)).bubble(), 0.01);
  }
}

// Of a step among many.
double period(const Problem& problem, const Schedule& schedule) {
  return clock(problem, actions_of(problem, schedule, 9)).makespan -
         clock(problem, actions_of(problem, schedule, 8)).makespan;
}

TEST(PipelineSchedules, WithoutFlushThereIsNoBubbleOrHalfOfOne) {
  for (int P : {1, 2, 3, 4, 8, 64})
    for (int M : {P, P + 1, 2 * P, 4 * P}) {
      if (P == 64 && M > P) continue;
      const Problem problem{.stages = P, .microbatches = M};
      SCOPED_TRACE(text_of(problem));
      EXPECT_EQ(period(problem, pipedream(problem)), 3 * M);
      EXPECT_EQ(period(problem, two_buffered_weights(problem)), 3 * M + 3 * ((P - 1) / 2));
      const Timing stashed = clock(problem, actions_of(problem, pipedream(problem), 4));
      const Timing late = clock(problem, actions_of(problem, two_buffered_weights(problem), 4));
      for (int p = 0; p < P; ++p) {
        EXPECT_EQ(stashed.stages[size_t(p)].peak_count, P - p);
        EXPECT_LE(late.stages[size_t(p)].peak_count, M + P);
      }
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
        EXPECT_EQ(refused.empty(), make == two_buffered_weights || M >= P - 1);
        if (!refused.empty()) continue;
        const Actions actions = actions_of(problem, schedule, 4);
        ASSERT_EQ(refusal([&] { require_no_deadlock(actions); }), "");
        ASSERT_EQ(refusal([&] { require_agreement(job_of(actions)); }), "");
        EXPECT_EQ(refusal([&] { clock(problem, actions, Sends::waiting); }), "");
      }
  EXPECT_EQ(refusal([] { pipedream({.stages = 4, .microbatches = 2}); }),
            "schedule pipedream over 4 stages needs at least 3 microbatches a step, and there are 2. Make "
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
      EXPECT_EQ(begun, make == pipedream ? 3 - int(s) : 6);
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
