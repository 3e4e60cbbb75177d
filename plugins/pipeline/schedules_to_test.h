// What tests of schedules share: all of them by name, problems of many sizes, and what they are refused with.
#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "engine/planning/agreement.h"
#include "plugins/pipeline/actions.h"
#include "plugins/pipeline/clock.h"
#include "plugins/pipeline/schedules/schedules.h"

namespace strata::pipeline {

struct Named {
  const char* name;
  Schedule (*make)(const Problem&);
  std::vector<int> chunks;
};
inline const std::vector<Named> kSchedules = {
    {"gpipe", gpipe, {1}},
    {"1f1b", one_forward_one_backward, {1}},
    {"interleaved", interleaved, {1, 2, 3, 4}},
    {"breadth_first", breadth_first, {1, 2, 3, 4}},
    {"zero_bubble_h1", zero_bubble_h1, {1}},
    {"zero_bubble_h2", zero_bubble_h2, {1}},
    {"zero_bubble_v", zero_bubble_v, {2}},
};

inline std::string text_of(const Problem& p) {
  return std::to_string(p.stages) + " stages, " + std::to_string(p.chunks) + " chunks, " +
         std::to_string(p.microbatches) + " microbatches";
}

inline void each_problem(const std::vector<int>& stages, const std::vector<int>& microbatches,
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

// What a stage may have to wait for before it sends or receives: passes before that in its list, or, as by way of
// memory, everything, but for receives what was sent since the last pass.
enum class Before { passes, all, all_but_sent };

// What a stage brings to the engine's check of real programs (engine/planning/agreement.h).
inline std::vector<RankExchanges> job_of(const Actions& actions, Before before = Before::passes) {
  std::vector<RankExchanges> job;
  for (int stage = 0; stage < actions.stages(); ++stage) {
    RankExchanges rank{Mesh(stage, {{"pipeline", actions.stages()}}), {}};
    std::vector<int32_t> place(2 * size_t(actions.chunks()) * size_t(actions.microbatches), INT32_MAX);
    int32_t received = 0, sent = 0, sent_before_pass = 0, needed = 0;
    for (const Action& action : actions.by_stage[size_t(stage)]) {
      const Message need = actions.needed(stage, action.pass);
      if (action.kind == Action::Kind::run) {
        if (need.chunk >= 0) needed = std::max(needed, place[actions.index(need)]);
        sent_before_pass = sent;
        continue;
      }
      const bool sends = action.kind == Action::Kind::send;
      ExchangeStep step{.what = text(sends ? actions.made(stage, action.pass) : need),
                        .axis = "pipeline",
                        .stream = sends ? Stream::send : Stream::receive,
                        .offset = action.peer - stage};
      step.after[size_t(Stream::receive)] = before == Before::passes ? needed : received;
      step.after[size_t(Stream::send)] = before == Before::passes                   ? 0
                                         : before == Before::all_but_sent && !sends ? sent_before_pass
                                                                                    : sent;
      if (sends)
        ++sent;
      else
        place[actions.index(need)] = ++received;
      rank.steps.push_back(step);
    }
    job.push_back(std::move(rank));
  }
  return job;
}

inline std::string refusal(const std::function<void()>& of) {
  try {
    of();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace strata::pipeline
