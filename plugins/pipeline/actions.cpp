// See actions.h.
#include "plugins/pipeline/actions.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <utility>

namespace strata::pipeline {
namespace {

using Part = Pass::Part;

bool makes_input_gradient(const Pass& pass) { return pass.part == Part::backward || pass.part == Part::input_gradient; }

std::string where(int stage, size_t position, const Pass& pass) {
  return "stage " + std::to_string(stage) + ", pass " + std::to_string(position) + " of its schedule, " +
         strata::text(pass) + ": ";
}

// Which of forward pass, input gradient and weight gradient have run, for all chunks and microbatches.
class Ran {
 public:
  Ran(int chunks, int microbatches)
      : microbatches_(microbatches), ran_(size_t(chunks) * size_t(microbatches) * 3, false) {}
  char& at(Part part, int chunk, int microbatch) {
    const size_t unit = part == Part::forward ? 0 : part == Part::input_gradient ? 1 : 2;
    return ran_[(size_t(chunk) * size_t(microbatches_) + size_t(microbatch)) * 3 + unit];
  }

 private:
  int microbatches_;
  std::vector<char> ran_;
};

void require_placement(const Problem& problem, const Schedule& schedule) {
  std::vector<int> held(size_t(problem.stages), 0);
  bool right = int(schedule.stage_of.size()) == problem.all_chunks() && schedule.stages() == problem.stages;
  for (int stage : schedule.stage_of)
    right = right && stage >= 0 && stage < problem.stages && ++held[size_t(stage)] > 0;
  for (int count : held) right = right && count == problem.chunks;
  if (!right)
    throw Error("the schedule does not give each of " + std::to_string(problem.stages) + " stages " +
                std::to_string(problem.chunks) + " of " + std::to_string(problem.all_chunks()) +
                " chunks and an order of passes.");
}

// Runs the passes of a stage one by one.
class StagePasses {
 public:
  StagePasses(const Actions& actions, int stage, Ran& ran) : actions_(actions), stage_(stage), ran_(ran) {}

  void run(const Pass& pass, size_t position) {
    const auto& own = actions_.own_chunks[size_t(stage_)];
    const auto refuse = [&](const std::string& why) { throw Error(where(stage_, position, pass) + why); };
    if (pass.chunk < 0 || pass.chunk >= int(own.size()))
      refuse("the stage has " + std::to_string(own.size()) + (own.size() == 1 ? " chunk" : " chunks") + ".");
    if (pass.microbatch < 0 || pass.microbatch >= actions_.microbatches) refuse("there is no such microbatch.");
    const int chunk = own[size_t(pass.chunk)], m = pass.microbatch;
    const auto need = [&](Part part, int other) {
      if (other < 0 || other >= actions_.chunks() || actions_.stage_of[size_t(other)] != stage_) return;
      if (!ran_.at(part, other, m))
        refuse("it needs the " + strata::text(Pass{part, own_of(other), m}) + ", which has not run yet.");
    };
    const auto once = [&](Part part) {
      if (std::exchange(ran_.at(part, chunk, m), true)) refuse("it has run before.");
    };
    if (pass.part == Part::forward) need(Part::forward, chunk - 1), once(Part::forward);
    if (makes_input_gradient(pass)) {
      need(Part::forward, chunk), need(Part::input_gradient, chunk + 1);
      once(Part::input_gradient);
    }
    if (pass.part == Part::backward) once(Part::weight_gradient);
    if (pass.part == Part::weight_gradient) need(Part::input_gradient, chunk), once(Part::weight_gradient);
  }

  void require_all() const {
    for (int m = 0; m < actions_.microbatches - actions_.left; ++m)
      for (int chunk : actions_.own_chunks[size_t(stage_)])
        for (Part part : {Part::forward, Part::input_gradient, Part::weight_gradient})
          if (!ran_.at(part, chunk, m))
            throw Error("stage " + std::to_string(stage_) + " never runs the " +
                        strata::text(Pass{part, own_of(chunk), m}) + ".");
  }

 private:
  int own_of(int chunk) const {
    const auto& own = actions_.own_chunks[size_t(stage_)];
    return int(std::find(own.begin(), own.end(), chunk) - own.begin());
  }
  const Actions& actions_;
  int stage_;
  Ran& ran_;
};

// The passes of a stage over all steps.
struct Steps {
  std::vector<Pass> passes;
  std::vector<size_t> end;  // by step
  int step_of(size_t pass) const { return int(std::upper_bound(end.begin(), end.end(), pass) - end.begin()); }
};

Steps steps_of(const Problem& problem, const Schedule& schedule, int stage, int steps) {
  Steps all;
  for (int step = 0; step < steps; ++step) {
    const bool first = step == 0 && !schedule.first.empty();
    for (Pass pass : first ? schedule.first.at(size_t(stage)) : schedule.order[size_t(stage)]) {
      pass.microbatch += step * problem.microbatches;
      all.passes.push_back(pass);
    }
    all.end.push_back(all.passes.size());
  }
  return all;
}

// What a stage is sent, in the order in which it is made, one step after the other.
struct Sent {
  Message message;
  int from;
  int step;
  double time;
  size_t receive_before = 0;  // which pass of the receiver
};

// Runs the passes of all stages on a clock, each as soon as it can, and notes what is sent.
class Rehearsal {
 public:
  Rehearsal(const Problem& problem, const Actions& actions, const std::vector<Steps>& steps)
      : problem_(problem), actions_(actions), steps_(steps), sent_(steps.size()) {
    const size_t messages = 2 * size_t(actions.chunks()) * size_t(actions.microbatches);
    needed_at_.assign(messages, kNever);
    needed_in_.assign(messages, kNoStep);
    for (size_t s = 0; s < steps.size(); ++s)
      for (size_t i = 0; i < steps[s].passes.size(); ++i)
        if (const Message need = actions.needed(int(s), steps[s].passes[i]); need.chunk >= 0)
          needed_at_[index(need)] = i, needed_in_[index(need)] = steps[s].step_of(i);
    for (const Steps& stage : steps) ended_.emplace_back(stage.passes.size(), 0);
    made_.assign(messages, -1);
    waits_.assign(messages, -1);
  }

  // In which step a message is sent: that of the pass that needs it; kNoStep: in none of these.
  static constexpr int kNoStep = -1;
  int sent_in(const Message& message) const { return needed_in_[index(message)]; }

  // By receiver. What cannot be made, as passes wait for each other, comes last.
  std::vector<std::vector<Sent>> run() {
    std::vector<size_t> next(steps_.size(), 0);
    std::vector<double> now(steps_.size(), 0);
    std::vector<int> step(steps_.size(), 0), awake;
    std::vector<std::vector<Message>> later(steps_.size());  // by stage: made, and sent in a later step
    const auto send = [&](const Message& message, int stage) {
      const size_t s = size_t(stage);
      sent_[size_t(actions_.stage_of[size_t(message.chunk)])].push_back({message, stage, step[s], now[s]});
      made_[index(message)] = now[s];
      if (waits_[index(message)] >= 0) awake.push_back(waits_[index(message)]);
    };
    const auto begin_steps = [&](int stage) {
      const size_t s = size_t(stage);
      while (next[s] >= steps_[s].end[size_t(step[s])]) {
        ++step[s];
        for (const Message& message : later[s])
          if (sent_in(message) == step[s]) send(message, stage);
      }
    };
    const auto go_on = [&](int stage, bool wait) {
      const size_t s = size_t(stage);
      for (; next[s] < steps_[s].passes.size(); ++next[s]) {
        const Pass& pass = steps_[s].passes[next[s]];
        begin_steps(stage);
        if (const Message need = actions_.needed(stage, pass); need.chunk >= 0) {
          const double made = made_[index(need)];
          if (wait && made < 0) {
            waits_[index(need)] = stage;
            return;
          }
          now[s] = std::max(now[s], made);
        }
        now[s] += seconds(problem_.cost(actions_.chunk(stage, pass)), pass);
        ended_[s][next[s]] = now[s];
        const Message message = actions_.made(stage, pass);
        if (message.chunk < 0 || sent_in(message) == kNoStep) continue;
        if (sent_in(message) < step[s])
          throw Error("the schedule needs the " + text(message) + " in a step before the one that makes it.");
        if (sent_in(message) == step[s])
          send(message, stage);
        else
          later[s].push_back(message);
      }
    };
    for (int stage = int(steps_.size()); stage-- > 0;) awake.push_back(stage);
    while (!awake.empty()) {
      const int stage = awake.back();
      awake.pop_back();
      go_on(stage, true);
    }
    for (auto& list : sent_)
      std::stable_sort(list.begin(), list.end(), [](const Sent& a, const Sent& b) {
        return std::tie(a.step, a.time, a.from) < std::tie(b.step, b.time, b.from);
      });
    for (size_t stage = 0; stage < steps_.size(); ++stage) go_on(int(stage), false);
    for (size_t stage = 0; stage < steps_.size(); ++stage) place_receives(int(stage), sent_[stage], steps_[stage]);
    return std::move(sent_);
  }

 private:
  static constexpr size_t kNever = size_t(-1);
  size_t index(const Message& m) const { return actions_.index(m); }

  void place_receives(int stage, std::vector<Sent>& sent, const Steps& receiver) const {
    const auto& ended = ended_[size_t(stage)];
    size_t before = receiver.passes.size();
    for (size_t i = sent.size(); i-- > 0;) {
      const Sent& one = sent[i];
      const size_t begin = one.step > 0 ? receiver.end[size_t(one.step) - 1] : 0, end = receiver.end[size_t(one.step)];
      const auto later =
          std::partition_point(ended.begin() + int64_t(begin), ended.begin() + int64_t(end),
                               [&](double time) { return std::pair(time, stage) < std::pair(one.time, one.from); });
      before = std::min({before, needed_at_[index(one.message)], size_t(later - ended.begin())});
      sent[i].receive_before = before;
    }
  }

  const Problem& problem_;
  const Actions& actions_;
  const std::vector<Steps>& steps_;
  std::vector<std::vector<Sent>> sent_;     // by receiver
  std::vector<std::vector<double>> ended_;  // by stage and pass: when
  std::vector<size_t> needed_at_;           // by message: the place of the pass in its stage's list
  std::vector<int> needed_in_;              // by message: the step of that pass
  std::vector<double> made_;                // by message: when; negative: not yet
  std::vector<int> waits_;                  // by message: the stage that waits for it
};

}  // namespace

double seconds(const ChunkCost& cost, const Pass& pass) {
  if (pass.part == Part::forward) return cost.forward;
  if (pass.part == Part::input_gradient) return cost.input_gradient;
  if (pass.part == Part::weight_gradient) return cost.weight_gradient;
  return cost.input_gradient + cost.weight_gradient;
}

std::string text(const Message& message) {
  return std::string(message.gradient ? "gradient" : "input") + " of chunk " + std::to_string(message.chunk) +
         ", microbatch " + std::to_string(message.microbatch);
}

Message Actions::made(int stage, const Pass& pass) const {
  const int from = chunk(stage, pass);
  const int to = pass.part == Part::forward ? from + 1 : makes_input_gradient(pass) ? from - 1 : -1;
  if (to < 0 || to >= chunks() || stage_of[size_t(to)] == stage) return {.chunk = -1};
  return {pass.part != Part::forward, to, pass.microbatch};
}

Message Actions::needed(int stage, const Pass& pass) const {
  const int to = chunk(stage, pass);
  const int from = pass.part == Part::forward ? to - 1 : makes_input_gradient(pass) ? to + 1 : -1;
  if (from < 0 || from >= chunks() || stage_of[size_t(from)] == stage) return {.chunk = -1};
  return {pass.part != Part::forward, to, pass.microbatch};
}

std::string Actions::text(int stage, const Action& action) const {
  const std::string begin = "stage " + std::to_string(stage) + ": ";
  if (action.kind == Action::Kind::send)
    return begin + "send of the " + pipeline::text(made(stage, action.pass)) + " to stage " +
           std::to_string(action.peer);
  if (action.kind == Action::Kind::receive)
    return begin + "receive of the " + pipeline::text(needed(stage, action.pass)) + " from stage " +
           std::to_string(action.peer);
  return begin + strata::text(action.pass);
}

Actions actions_of(const Problem& problem, const Schedule& schedule, int steps) {
  require_placement(problem, schedule);
  Actions actions{.stage_of = schedule.stage_of,
                  .own_chunks = schedule.own_chunks(),
                  .microbatches = problem.microbatches * steps,
                  .left = schedule.first.empty() ? 0 : problem.microbatches,
                  .by_stage = {}};
  std::vector<Steps> passes;
  Ran ran(actions.chunks(), actions.microbatches);
  for (int stage = 0; stage < problem.stages; ++stage) {
    passes.push_back(steps_of(problem, schedule, stage, steps));
    StagePasses own(actions, stage, ran);
    for (size_t i = 0; i < passes.back().passes.size(); ++i) own.run(passes.back().passes[i], i);
    own.require_all();
  }
  Rehearsal rehearsal(problem, actions, passes);
  const std::vector<std::vector<Sent>> sent = rehearsal.run();
  for (int stage = 0; stage < problem.stages; ++stage) {
    const auto& [own, end] = passes[size_t(stage)];
    const auto& in = sent[size_t(stage)];
    const auto& chunks = actions.own_chunks[size_t(stage)];
    std::vector<Action> list;
    const auto send = [&](const Pass& pass, int step) {
      if (const Message message = actions.made(stage, pass); message.chunk >= 0 && rehearsal.sent_in(message) == step)
        list.push_back({Action::Kind::send, pass, actions.stage_of[size_t(message.chunk)], step});
    };
    size_t received = 0, i = 0;
    for (int step = 0; step < steps; ++step) {
      const auto receive = [&](size_t before) {
        for (; received < in.size() && in[received].step == step && in[received].receive_before <= before; ++received) {
          const Message& message = in[received].message;
          const int chunk = int(std::find(chunks.begin(), chunks.end(), message.chunk) - chunks.begin());
          const Pass reader{message.gradient ? Part::input_gradient : Part::forward, chunk, message.microbatch};
          list.push_back({Action::Kind::receive, reader, in[received].from, step});
        }
      };
      for (size_t before = 0; before < i; ++before) send(own[before], step);
      for (; i < end[size_t(step)]; ++i) {
        receive(i);
        list.push_back({.pass = own[i], .step = step});
        send(own[i], step);
      }
      receive(i);
    }
    actions.by_stage.push_back(std::move(list));
  }
  return actions;
}

namespace {

// Passes and transfers as nodes of a graph, with what each waits for.
class Waits {
 public:
  explicit Waits(const Actions& actions) : actions_(actions) {
    of_message_.assign(2 * size_t(actions.chunks()) * size_t(actions.microbatches), kNone);
    for (int stage = 0; stage < actions.stages(); ++stage) list_exchanges(stage);
    for (const auto& [ends, exchanges] : exchanges_) match(ends.first, ends.second, exchanges);
    for (int stage = 0; stage < actions.stages(); ++stage) queue_exchanges(stage);
    for (int stage = 0; stage < actions.stages(); ++stage) list_passes(stage);
  }

  void require_end() const {
    std::vector<int32_t> waits(nodes_.size(), 0), first(nodes_.size() + 1, 0), next;
    for (size_t i = 0; i < nodes_.size(); ++i)
      for (int32_t before : nodes_[i].after)
        if (before != kNone) ++waits[i], ++first[size_t(before) + 1];
    for (size_t i = 1; i < first.size(); ++i) first[i] += first[i - 1];
    next.resize(size_t(first.back()));
    std::vector<int32_t> at(first.begin(), first.end() - 1), ready;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      for (int32_t before : nodes_[i].after)
        if (before != kNone) next[size_t(at[size_t(before)]++)] = int32_t(i);
      if (waits[i] == 0) ready.push_back(int32_t(i));
    }
    size_t ended = 0;
    for (; !ready.empty(); ++ended) {
      const size_t node = size_t(ready.back());
      ready.pop_back();
      for (int32_t n = first[node]; n < first[node + 1]; ++n)
        if (--waits[size_t(next[size_t(n)])] == 0) ready.push_back(next[size_t(n)]);
    }
    if (ended < nodes_.size()) throw Error("the schedule would never end: " + circle(waits) + ".");
  }

 private:
  static constexpr int32_t kNone = -1;
  struct Node {
    int stage;
    size_t action;
    std::array<int32_t, 4> after{kNone, kNone, kNone, kNone};
  };
  struct End {  // of a transfer
    size_t action;
    Message message;
    size_t passes_before;
  };
  struct Exchanges {
    std::vector<End> sends, receives;
  };

  int32_t& of(const Message& m) { return of_message_[actions_.index(m)]; }

  void list_exchanges(int stage) {
    size_t passes = 0;
    const auto& list = actions_.by_stage[size_t(stage)];
    for (size_t i = 0; i < list.size(); ++i) {
      const Action& action = list[i];
      if (action.kind == Action::Kind::run) {
        ++passes;
        continue;
      }
      const bool sends = action.kind == Action::Kind::send;
      const Message message = sends ? actions_.made(stage, action.pass) : actions_.needed(stage, action.pass);
      if (message.chunk < 0) throw Error("stage " + std::to_string(stage) + " exchanges what no other stage has.");
      if (sends)
        exchanges_[{stage, action.peer}].sends.push_back({i, message, passes});
      else
        exchanges_[{action.peer, stage}].receives.push_back({i, message, passes});
    }
    first_pass_.push_back(int32_t(passes_));
    passes_ += passes;
  }

  // The nodes of passes come first, stage by stage, then those of transfers.
  void match(int from, int to, const Exchanges& exchanges) {
    nodes_.resize(std::max(nodes_.size(), passes_));
    const auto& [sends, receives] = exchanges;
    for (size_t i = 0; i < std::max(sends.size(), receives.size()); ++i) {
      if (i >= sends.size() || i >= receives.size() || sends[i].message != receives[i].message)
        throw Error("stage " + std::to_string(from) + " sends stage " + std::to_string(to) + " " +
                    (i < sends.size() ? "the " + text(sends[i].message) : "nothing more") + ", and that receives " +
                    (i < receives.size() ? "the " + text(receives[i].message) : "nothing more") + ".");
      Node node{to, receives[i].action};
      const auto last = [&](int stage, size_t passes) {
        return passes == 0 ? kNone : first_pass_[size_t(stage)] + int32_t(passes) - 1;
      };
      node.after = {last(from, sends[i].passes_before), last(to, receives[i].passes_before), kNone, kNone};
      if (of(sends[i].message) != kNone)
        throw Error("stage " + std::to_string(from) + " sends the " + text(sends[i].message) + " twice.");
      of(sends[i].message) = int32_t(nodes_.size());
      nodes_.push_back(node);
    }
  }

  // A stage's sends one after the other, and its receives.
  void queue_exchanges(int stage) {
    int32_t sent = kNone, received = kNone;
    for (const Action& action : actions_.by_stage[size_t(stage)]) {
      if (action.kind == Action::Kind::run) continue;
      const bool sends = action.kind == Action::Kind::send;
      const int32_t node = of(sends ? actions_.made(stage, action.pass) : actions_.needed(stage, action.pass));
      nodes_[size_t(node)].after[sends ? 2 : 3] = std::exchange(sends ? sent : received, node);
    }
  }

  void list_passes(int stage) {
    nodes_.resize(std::max(nodes_.size(), passes_));
    const auto& list = actions_.by_stage[size_t(stage)];
    int32_t own = first_pass_[size_t(stage)];
    for (size_t i = 0; i < list.size(); ++i) {
      if (list[i].kind != Action::Kind::run) continue;
      Node& node = nodes_[size_t(own)];
      node.stage = stage, node.action = i;
      if (own > first_pass_[size_t(stage)]) node.after[0] = own - 1;
      if (const Message message = actions_.needed(stage, list[i].pass); message.chunk >= 0) {
        node.after[1] = of(message);
        if (node.after[1] == kNone || nodes_[size_t(node.after[1])].action > i)
          throw Error(actions_.text(stage, list[i]) + " does not come after the receive of the " + text(message) + ".");
      }
      ++own;
    }
    require_made_before_sent(stage);
  }

  void require_made_before_sent(int stage) const {
    std::vector<char> ran(of_message_.size(), false);
    for (const Action& action : actions_.by_stage[size_t(stage)]) {
      const Message message = actions_.made(stage, action.pass);
      if (message.chunk < 0) continue;
      if (action.kind == Action::Kind::run) ran[actions_.index(message)] = true;
      if (action.kind == Action::Kind::send && !ran[actions_.index(message)])
        throw Error(actions_.text(stage, action) + " comes before the pass that makes it.");
    }
  }

  // Every node that has not ended waits for one that has not: following those comes around.
  std::string circle(const std::vector<int32_t>& waits) const {
    size_t node = size_t(std::find_if(waits.begin(), waits.end(), [](int32_t n) { return n > 0; }) - waits.begin());
    const auto back = [&](size_t from) {
      for (int32_t before : nodes_[from].after)
        if (before != kNone && waits[size_t(before)] > 0) return size_t(before);
      return from;
    };
    for (size_t i = 0; i < nodes_.size(); ++i) node = back(node);
    std::string told;
    size_t count = 0;
    const size_t begin = node;
    do {
      const Node& one = nodes_[node];
      if (++count <= 12)
        told += (told.empty() ? "" : "; which waits for ") +
                actions_.text(one.stage, actions_.by_stage[size_t(one.stage)][one.action]);
      node = back(node);
    } while (node != begin);
    return told + (count > 12 ? "; …" : "") + "; which waits for the first";
  }

  const Actions& actions_;
  std::vector<Node> nodes_;
  std::vector<int32_t> first_pass_, of_message_;
  size_t passes_ = 0;
  std::map<std::pair<int, int>, Exchanges> exchanges_;  // by sender and receiver
};

}  // namespace

void require_no_deadlock(const Actions& actions) { Waits(actions).require_end(); }

std::vector<Ahead> passes_ahead(const Actions& actions) {
  struct Received {
    Message message;
    size_t before;  // so many passes
  };
  const size_t stages = size_t(actions.stages());
  std::vector<std::vector<Pass>> passes(stages);
  std::vector<std::vector<Received>> received(stages);
  std::vector<Ahead> ahead(stages);
  std::vector<size_t> forward(stages);  // passes before the first of another kind
  std::vector<std::pair<size_t, size_t>> made(2 * size_t(actions.chunks()) * size_t(actions.microbatches));
  for (size_t s = 0; s < stages; ++s) {
    for (const Action& action : actions.by_stage[s]) {
      if (action.kind == Action::Kind::receive)
        received[s].push_back({actions.needed(int(s), action.pass), passes[s].size()});
      if (action.kind != Action::Kind::run) continue;
      if (const Message message = actions.made(int(s), action.pass); message.chunk >= 0)
        made[actions.index(message)] = {s, passes[s].size()};
      if (action.pass.part == Part::forward && forward[s] == passes[s].size()) ++forward[s];
      passes[s].push_back(action.pass);
    }
    ahead[s].passes = std::min(stages - 1 - s, forward[s]);
  }
  const auto is_sent = [&](const Message& message) {
    const auto& [from, pass] = made[actions.index(message)];
    return pass < ahead[from].passes;
  };
  const auto lower = [](size_t& count, size_t to) { return count > to && (count = to, true); };
  for (bool changed = true; std::exchange(changed, false);)
    for (size_t s = 0; s < stages; ++s) {
      size_t& receives = ahead[s].receives = 0;
      for (const Received& one : received[s]) {
        if (!is_sent(one.message)) continue;
        // What comes behind others, or when the stage has gone on, is not sent so early.
        if (&one - received[s].data() == ptrdiff_t(receives) && one.before <= forward[s])
          ++receives;
        else
          changed |=
              lower(ahead[made[actions.index(one.message)].first].passes, made[actions.index(one.message)].second);
      }
      for (size_t p = 0; p < ahead[s].passes; ++p)
        if (const Message message = actions.needed(int(s), passes[s][p]); message.chunk >= 0 && !is_sent(message))
          changed |= lower(ahead[s].passes, p);
    }
  return ahead;
}

Actions repeated(const Actions& two, int steps) {
  STRATA_CHECK(steps >= 2);
  Actions all = two;
  const int microbatches = two.microbatches / 2;
  all.microbatches = microbatches * steps;
  for (size_t s = 0; s < two.by_stage.size(); ++s)
    for (int step = 2; step < steps; ++step)
      for (Action action : two.by_stage[s]) {
        if (action.step != 1) continue;
        action.step = step;
        action.pass.microbatch += microbatches * (step - 1);
        all.by_stage[s].push_back(action);
      }
  return all;
}

}  // namespace strata::pipeline
