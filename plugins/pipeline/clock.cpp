// See clock.h.
#include "plugins/pipeline/clock.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>

namespace strata::pipeline {
namespace {

using Part = Pass::Part;

// What a stage keeps while its passes run one by one.
class Kept {
 public:
  void run(const Pass& pass, const ChunkCost& cost) {
    if (pass.part == Part::forward) bytes_ += cost.activation, ++count_;
    peak_bytes = std::max(peak_bytes, bytes_);
    peak_count = std::max(peak_count, count_);
    if (pass.part == Part::input_gradient) bytes_ -= cost.activation - cost.weight_activation;
    peak_bytes = std::max(peak_bytes, bytes_);
    if (pass.part == Part::weight_gradient) bytes_ -= cost.weight_activation, --count_;
    if (pass.part == Part::backward) bytes_ -= cost.activation, --count_;
  }
  int64_t peak_bytes = 0;
  int peak_count = 0;

 private:
  int64_t bytes_ = 0;
  int count_ = 0;
};

// Every stage goes on until a pass needs what has not come. Times follow from waits alone, so in which order stages are
// looked at does not matter.
class Clock {
 public:
  Clock(const Problem& problem, const Actions& actions, Sends sends)
      : problem_(problem), actions_(actions), sends_(sends), stages_(size_t(actions.stages())) {
    come_.assign(2 * size_t(actions.chunks()) * size_t(actions.microbatches), kNever);
    waits_.assign(come_.size(), kNobody);
  }

  Timing run() {
    for (int stage = 0; stage < actions_.stages(); ++stage) awake_.push_back(stage);
    while (!awake_.empty()) {
      const int stage = awake_.back();
      awake_.pop_back();
      go_on(stage);
    }
    Timing timing;
    for (size_t s = 0; s < stages_.size(); ++s) {
      if (stages_[s].next < actions_.by_stage[s].size())
        throw Error("stages would wait for each other: " +
                    actions_.text(int(s), actions_.by_stage[s][stages_[s].next]) + " never begins.");
      stages_[s].time.peak_bytes = stages_[s].kept.peak_bytes;
      stages_[s].time.peak_count = stages_[s].kept.peak_count;
      timing.makespan = std::max(timing.makespan, stages_[s].time.end);
      timing.stages.push_back(stages_[s].time);
    }
    for (const Stage& stage : stages_)
      if (!stage.sends.empty() || !stage.receives.empty())
        throw Error("stages would wait for each other: not all that is sent is received.");
    return timing;
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static constexpr int kNobody = -1;
  struct Exchange {
    Message message;
    int peer;
    double at;  // when all passes before it have ended
  };
  struct Stage {
    size_t next = 0;
    bool begun = false;
    StageTime time;
    Kept kept;
    std::deque<Exchange> sends, receives;      // come to, and not begun
    double sends_free = 0, receives_free = 0;  // when the last one that has begun ends
  };

  size_t index(const Message& m) const { return actions_.index(m); }

  void go_on(int number) {
    Stage& stage = stages_[size_t(number)];
    const auto& list = actions_.by_stage[size_t(number)];
    for (; stage.next < list.size(); ++stage.next) {
      const Action& action = list[stage.next];
      if (action.kind == Action::Kind::send) {
        send(number, {actions_.made(number, action.pass), action.peer, stage.time.end});
      } else if (action.kind == Action::Kind::receive) {
        if (sends_ == Sends::buffered) continue;
        stage.receives.push_back({actions_.needed(number, action.pass), action.peer, stage.time.end});
        meet(action.peer);
      } else if (!run(number, stage, action.pass)) {
        return;
      }
    }
  }

  bool run(int number, Stage& stage, const Pass& pass) {
    double begin = stage.time.end;
    if (const Message message = actions_.needed(number, pass); message.chunk >= 0) {
      const double come = come_[index(message)];
      if (come == kNever) return waits_[index(message)] = number, false;
      begin = std::max(begin, come);
    }
    const ChunkCost& cost = problem_.cost(actions_.chunk(number, pass));
    const double took = seconds(cost, pass);
    if (!stage.begun) stage.begun = true, stage.time.begin = begin;
    stage.time.end = begin + took;
    stage.time.busy += took;
    stage.kept.run(pass, cost);
    return true;
  }

  void send(int from, const Exchange& sent) {
    if (sends_ == Sends::waiting) {
      stages_[size_t(from)].sends.push_back(sent);
      return meet(from);
    }
    double& free = links_[{from, sent.peer}];
    free = std::max(free, sent.at) + problem_.crossing;
    come(sent.message, free);
  }

  // Begins what a stage sends next, if the receiver receives that next.
  void meet(int from) {
    for (;;) {
      Stage& sender = stages_[size_t(from)];
      if (sender.sends.empty()) return;
      const Exchange sent = sender.sends.front();
      Stage& receiver = stages_[size_t(sent.peer)];
      if (receiver.receives.empty() || receiver.receives.front().message != sent.message) return;
      const double begin = std::max({sent.at, receiver.receives.front().at, sender.sends_free, receiver.receives_free});
      sender.sends_free = receiver.receives_free = begin + problem_.crossing;
      sender.sends.pop_front(), receiver.receives.pop_front();
      come(sent.message, begin + problem_.crossing);
      if (!receiver.receives.empty() && receiver.receives.front().peer != from) meet(receiver.receives.front().peer);
    }
  }

  void come(const Message& message, double at) {
    come_[index(message)] = at;
    if (waits_[index(message)] != kNobody) awake_.push_back(waits_[index(message)]);
  }

  const Problem& problem_;
  const Actions& actions_;
  const Sends sends_;
  std::vector<Stage> stages_;
  std::map<std::pair<int, int>, double> links_;  // by sender and receiver: when the last transfer ends
  std::vector<double> come_;                     // by message: when it was received
  std::vector<int> waits_;                       // by message: the stage that waits for it
  std::vector<int> awake_;
};

}  // namespace

double Timing::span() const {
  double longest = 0;
  for (const StageTime& stage : stages) longest = std::max(longest, stage.end - stage.begin);
  return longest;
}

double Timing::bubble() const {
  double busy = 0;
  for (const StageTime& stage : stages) busy = std::max(busy, stage.busy);
  return span() / busy - 1;
}

int64_t Timing::peak_bytes() const {
  int64_t most = 0;
  for (const StageTime& stage : stages) most = std::max(most, stage.peak_bytes);
  return most;
}

Timing clock(const Problem& problem, const Actions& actions, Sends sends) {
  return Clock(problem, actions, sends).run();
}

std::vector<int64_t> peak_bytes(const Problem& problem, const Schedule& schedule) {
  const auto own_chunks = schedule.own_chunks();
  std::vector<int64_t> peaks;
  for (size_t stage = 0; stage < schedule.order.size(); ++stage) {
    Kept kept;
    for (const Pass& pass : schedule.order[stage])
      kept.run(pass, problem.cost(own_chunks[stage].at(size_t(pass.chunk))));
    peaks.push_back(kept.peak_bytes);
  }
  return peaks;
}

}  // namespace strata::pipeline
