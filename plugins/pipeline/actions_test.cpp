// Every order of a schedule is one that can run; and the check of sends and receives against thousands of orders that
// cannot, and against ranks that run what it accepts.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "comm/world.h"
#include "plugins/pipeline/schedules_to_test.h"

namespace strata::pipeline {
namespace {

// All small problems: the passes are right, all stages come to their end where sends wait, and the engine's check of
// programs says so too, even where a stage does one thing at a time.
TEST(PipelineActions, CanAllRun) {
  std::vector<int> microbatches;
  for (int m = 1; m <= 20; ++m) microbatches.push_back(m);
  each_problem({1, 2, 3, 4, 5, 8}, microbatches, [](const Named& schedule, const Problem& equal) {
    for (const bool uneven : {false, true}) {
      Problem problem = equal;
      for (int g = 0; uneven && g < problem.all_chunks(); ++g)
        problem.costs.push_back({double(1 + g * 7 % 5), double(2 + g * 3 % 4), double(g % 3)});
      const Actions actions = actions_of(problem, schedule.make(problem));
      ASSERT_EQ(refusal([&] { require_no_deadlock(actions); }), "");
      for (const Before before : {Before::passes, Before::all})
        ASSERT_EQ(refusal([&] { require_agreement(job_of(actions, before)); }), "");
      problem.crossing = 0.5;
      const double buffered = clock(problem, actions).makespan;
      EXPECT_GE(clock(problem, actions, Sends::waiting).makespan, buffered);
    }
  });
}

// What stages run ahead of updates: as many passes as go by until the last stage has ended its step, where they have so
// many; and whatever is sent in one is received in another.
TEST(PipelineActions, PassesAheadFitTogether) {
  each_problem({2, 3, 4, 5, 8}, {1, 2, 3, 4, 7, 16}, [](const Named& schedule, const Problem& problem) {
    const Actions actions = actions_of(problem, schedule.make(problem));
    const std::vector<Ahead> ahead = passes_ahead(actions);
    ASSERT_EQ(ahead.size(), size_t(actions.stages()));
    std::vector<size_t> sent, received;
    for (int stage = 0; stage < actions.stages(); ++stage) {
      size_t passes = 0, receives = 0, all = 0;
      for (const Action& action : actions.by_stage[size_t(stage)]) {
        const Ahead& own = ahead[size_t(stage)];
        if (action.kind == Action::Kind::receive && receives++ < own.receives)
          received.push_back(actions.index(actions.needed(stage, action.pass)));
        if (action.kind != Action::Kind::run || passes++ >= own.passes) continue;
        ++all;
        EXPECT_EQ(action.pass.part, Pass::Part::forward);
        if (const Message made = actions.made(stage, action.pass); made.chunk >= 0) sent.push_back(actions.index(made));
        const Message needed = actions.needed(stage, action.pass);
        EXPECT_TRUE(needed.chunk < 0 || std::ranges::count(received, actions.index(needed)) == 1);
      }
      EXPECT_EQ(all, size_t(std::min(actions.stages() - 1 - stage, problem.microbatches)));
    }
    std::ranges::sort(sent), std::ranges::sort(received);
    EXPECT_EQ(sent, received);
  });
}

// Random changes of orders of passes. Where these can run, the order of what is received lets stages do one thing at a
// time.
TEST(PipelineActions, MutatedPassesAreRefusedOrEnd) {
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
    for (const Before before : {Before::passes, Before::all})
      EXPECT_EQ(refusal([&] { require_agreement(job_of(actions, before)); }).empty(), refused.empty()) << refused;
    ++(refused.empty() ? right : never_end);
  }
  EXPECT_GT(wrong, 300);
  EXPECT_GT(never_end, 300);
  EXPECT_GT(right, 300);
}

// Swaps, moves among the passes, or drops so many sends and receives.
void change_exchanges(Actions& actions, size_t changes, std::mt19937& random) {
  const auto below = [&](size_t n) { return size_t(random() % n); };
  while (changes-- > 0) {
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

TEST(PipelineActions, WhatIsAcceptedEndsOnRealRanks) {
  std::mt19937 random(22);
  const auto below = [&](size_t n) { return size_t(random() % n); };
  int accepted = 0, changed = 0;  // the latter where sends and receives are not as actions_of puts them
  for (int round = 0; accepted < 60 || changed < 20; ++round) {
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
    const size_t changes = below(3);
    if (!refusal([&] {
           actions = actions_of(problem, schedule);
           change_exchanges(actions, changes, random);
           require_no_deadlock(actions);
         }).empty())
      continue;
    SCOPED_TRACE(std::string(named.name) + ", " + text_of(problem) + ", round " + std::to_string(round));
    run_local(
        problem.stages, [&](World& world) { Rank(actions, world).run(); }, 20);
    ++accepted, changed += changes > 0;
  }
}

// Random changes of sends and receives, the passes being right.
TEST(PipelineActions, MutatedSendsAndReceivesAreRefusedOrEnd) {
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
    change_exchanges(actions, 1 + below(2), random);
    const std::string refused = refusal([&] { require_no_deadlock(actions); });
    const std::string stands = refusal([&] { clock(problem, actions, Sends::waiting); });
    if (refused.empty()) {
      EXPECT_EQ(stands, "");
      EXPECT_EQ(refusal([&] { require_agreement(job_of(actions)); }), "");
    } else if (refused.find("would never end") != std::string::npos) {
      EXPECT_NE(stands, "") << refused;
      EXPECT_NE(refusal([&] { require_agreement(job_of(actions, Before::all)); }), "") << refused;
      ++never_end;
      continue;
    }
    ++(refused.empty() ? right : other);
  }
  EXPECT_GT(other, 300);
  EXPECT_GT(never_end, 50);
  EXPECT_GT(right, 300);
}

// Those of one of two steps by themselves, as the program of a step has them.
Actions of_step(const Actions& two, int step) {
  Actions one = two;
  for (auto& list : one.by_stage) std::erase_if(list, [&](const Action& action) { return action.step != step; });
  return one;
}

// Without flush two stages may send each other something as a step begins, and neither can wait for that before it
// receives. Memory is kept so that it need not (keep_what_is_sent), and all else may be waited for.
TEST(PipelineActions, StepsWithoutFlushMayWaitForAllButWhatIsSent) {
  for (const int stages : {2, 3, 5, 8})
    for (const int microbatches : {8, 9, 15}) {
      const Problem problem{.stages = stages, .microbatches = microbatches};
      for (auto make : {pipedream, two_buffered_weights}) {
        SCOPED_TRACE(text_of(problem));
        const Actions two = actions_of(problem, make(problem), 2);
        for (int step : {0, 1})
          ASSERT_EQ(refusal([&] { require_agreement(job_of(of_step(two, step), Before::all_but_sent)); }), "");
      }
    }
}

// Without flush: where the engine finds nothing wrong with the first step and with each that follows, by themselves,
// any number of steps in a row come to an end.
TEST(PipelineActions, MutatedStepsWithoutFlushAreRefusedOrGoOn) {
  std::mt19937 random(23);
  const auto below = [&](size_t n) { return size_t(random() % n); };
  int wrong = 0, right = 0;
  for (int round = 0; round < 3000; ++round) {
    const Problem problem{.stages = 2 + int(below(4)), .microbatches = 5 + int(below(4))};
    const bool is_2bw = below(2) == 0;
    SCOPED_TRACE((is_2bw ? "2bw, " : "pipedream, ") + text_of(problem) + ", round " + std::to_string(round));
    Actions two = actions_of(problem, is_2bw ? two_buffered_weights(problem) : pipedream(problem), 2);
    for (size_t n = 1 + below(2); n-- > 0;) {
      auto& list = two.by_stage[below(two.by_stage.size())];
      const size_t a = below(list.size() - 1), b = std::min(list.size() - 1, a + 1 + below(4));
      if (list[a].step != list[b].step || list[a].kind == Action::Kind::run) continue;
      const auto at = [&](size_t i) { return list.begin() + int64_t(i); };
      const size_t what = below(8);
      if (what == 0)
        list.erase(at(a));
      else if (what < 4)
        std::rotate(at(a), at(a) + 1, at(b) + 1);
      else
        std::rotate(at(a), at(b), at(b) + 1);
    }
    const Actions many = repeated(two, 5);
    const std::string refused = refusal([&] {
      for (int step : {0, 1}) require_agreement(job_of(of_step(two, step)));
      require_no_deadlock(many);
    });
    const std::string stands = refusal([&] { clock(problem, many, Sends::waiting); });
    EXPECT_EQ(refused.empty() ? stands : "", "");
    if (refused.find("schedule would never end") != std::string::npos) {
      EXPECT_NE(stands, "") << refused;
    }
    ++(refused.empty() ? right : wrong);
  }
  EXPECT_GT(right, 300);
  EXPECT_GT(wrong, 300);
}

// Each stage sends the other first what that needs last.
TEST(PipelineActions, TheCircleIsTold) {
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

TEST(PipelineActions, WrongPassesAreRefused) {
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

}  // namespace
}  // namespace strata::pipeline
