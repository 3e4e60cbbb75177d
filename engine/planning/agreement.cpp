// See agreement.h.
#include "engine/planning/agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "strata/error.h"
#include "strata/json.h"
#include "strata/op_kind.h"

namespace strata {
namespace {

// A tensor by what all members of a group know of it alike: names may differ where programs do, and the sizes of shares
// do.
std::string described(const Tensor& tensor) {
  std::string text = std::string(name_of(tensor.dtype)) + strata::text(tensor.full_shape());
  for (const Split& split : tensor.layout) text += " by " + split.axis + " in " + std::to_string(split.dimension);
  return text;
}

std::string described(const Program& program, const Op& op) {
  std::string text = op.kind->name;
  for (const auto& [name, value] : op.attributes.all())
    text += " " + name + " = " + std::visit([](const auto& v) { return fmt::format("{}", v); }, value);
  const auto list = [&](const std::vector<TensorId>& ids) {
    std::string all;
    for (TensorId id : ids) all += (all.empty() ? "" : ", ") + described(program[id]);
    return all;
  };
  return text + ": " + list(op.inputs) + " -> " + list(op.outputs);
}

// What a send and its receive know alike: beside type and sizes which crossing it is, of which pass and microbatch.
std::string passed(Tensor tensor, const Op& op) {
  // What one of them has kept since the step before names its rank's own by a split that the other need not have.
  Layout layout = tensor.layout;
  std::erase_if(layout, [](const Split& split) { return split.unseen; });
  tensor.layout = std::move(layout);
  std::string text = "passes " + described(tensor);
  if (!op.attributes.has("crossing")) return text;
  return text + ", crossing " + std::to_string(op.attributes.integer("crossing")) + " of the " +
         std::string(name_of(op.step_part)) + " pass, microbatch " + std::to_string(op.microbatch);
}

// The steps of all ranks at once: each goes on until it comes to an exchange to which not all members have come.
class Job {
  using Place = std::pair<int, Stream>;  // a rank and one of its streams

 public:
  explicit Job(std::span<const RankExchanges> ranks) : ranks_(ranks), arrived_(ranks.size()) {
    for (size_t r = 0; r < ranks.size(); ++r) {
      ended_.push_back({});
      streams_.emplace_back();
      for (size_t i = 0; i < ranks[r].steps.size(); ++i)
        streams_[r][size_t(ranks[r].steps[i].stream)].push_back(int32_t(i));
    }
  }

  void run() {
    std::vector<size_t> awake(ranks_.size());
    for (size_t r = 0; r < awake.size(); ++r) awake[r] = r;
    while (!awake.empty()) {
      const size_t rank = awake.back();
      awake.pop_back();
      for (int s = 0; s < kStreams; ++s)
        if (const ExchangeStep* step = next(rank, s); step && can_begin(rank, *step)) arrive(rank, *step, awake);
    }
    for (size_t r = 0; r < ranks_.size(); ++r)
      for (int s = 0; s < kStreams; ++s)
        if (size_t(ended_[r][size_t(s)]) < streams_[r][size_t(s)].size())
          throw Error("the ranks' exchanges would never end: " + where() + ". This is a mistake in the plan.",
                      ExitCode::failed);
  }

 private:
  // What a rank stands at on a stream, and whether what is to end before has ended.
  const ExchangeStep* next(size_t rank, int stream) const {
    const auto& list = streams_[rank][size_t(stream)];
    const size_t n = size_t(ended_[rank][size_t(stream)]);
    return n < list.size() ? &ranks_[rank].steps[size_t(list[n])] : nullptr;
  }
  bool can_begin(size_t rank, const ExchangeStep& step) const {
    for (size_t s = 0; s < step.after.size(); ++s)
      if (ended_[rank][s] < step.after[s]) return false;
    return true;
  }

  // The rank comes to an exchange; it ends with the last member.
  void arrive(size_t rank, const ExchangeStep& step, std::vector<size_t>& awake) {
    if (std::exchange(arrived_[rank][size_t(step.stream)], true)) return;
    const std::vector<Place> members = members_of(rank, step);
    Meeting& meeting = meetings_[{step.axis, members.front(), members.back()}];
    if (meeting.count++ == 0) meeting.first = rank, meeting.stream = step.stream;
    const ExchangeStep& of_first = *next(meeting.first, int(meeting.stream));
    if (of_first.what != step.what)
      throw Error("ranks make different exchanges over the axis " + step.axis + ": rank " +
                      std::to_string(meeting.first) + " " + of_first.what + ", rank " + std::to_string(rank) + " " +
                      step.what + ". This is a mistake in the plan.",
                  ExitCode::failed);
    if (meeting.count < members.size()) return;
    meeting.count = 0;
    for (const auto& [member, stream] : members) {
      ++ended_[size_t(member)][size_t(stream)];
      arrived_[size_t(member)][size_t(stream)] = false;
      awake.push_back(size_t(member));
    }
  }

  // Who takes part in an exchange, and on which of its streams: all of a group on the same one, or a sender and a
  // receiver.
  std::vector<Place> members_of(size_t rank, const ExchangeStep& step) const {
    const Axis& axis = ranks_[rank].mesh[step.axis];
    if (step.stream != Stream::send && step.stream != Stream::receive) {
      std::vector<Place> all;
      for (int member : axis.members) all.push_back({member, step.stream});
      return all;
    }
    const int other = axis.members[size_t(((axis.coordinate + step.offset) % axis.size + axis.size) % axis.size)];
    if (step.stream == Stream::send) return {{int(rank), Stream::send}, {other, Stream::receive}};
    return {{other, Stream::send}, {int(rank), Stream::receive}};
  }

  // Up to four ranks that did not come to their end.
  std::string where() const {
    std::string text;
    int told = 0;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      std::string stands;
      for (int s = 0; s < kStreams; ++s)
        if (const ExchangeStep* step = next(r, s))
          stands += (stands.empty() ? "" : " and ") + (step->what + " over " + step->axis);
      if (++told > 4) return text + "; …";
      text += (text.empty() ? "" : "; ") + ("rank " + std::to_string(r)) +
              (stands.empty() ? " is done" : " stands at " + stands);
    }
    return text;
  }

  std::span<const RankExchanges> ranks_;
  std::vector<std::array<std::vector<int32_t>, kStreams>> streams_;  // by rank: its steps
  std::vector<VectorClock> ended_;
  std::vector<std::array<bool, kStreams>> arrived_;  // at the exchange that comes next on a stream
  struct Meeting {
    size_t count = 0, first = 0;  // members that have come; one of them
    Stream stream{};              // of that one
  };
  std::map<std::tuple<std::string, Place, Place>, Meeting> meetings_;  // by axis, first and last member
};

}  // namespace

std::vector<ExchangeStep> exchanges_of(const Program& program, const Waits& waits,
                                       const std::function<bool(Stream)>& queued) {
  std::vector<ExchangeStep> steps;
  std::array<std::vector<VectorClock>, kStreams> ended;  // by stream and op: the exchanges that have ended with it
  VectorClock filled{};                                  // before the thread that fills the queues comes to the next op
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    auto& mine = ended[size_t(op.stream)];
    VectorClock clock = mine.empty() ? VectorClock{} : mine.back();
    for (const Wait& wait : waits[i]) {
      if (wait.count <= 0) continue;  // for the step before, which ends by itself
      const VectorClock& other = ended[size_t(wait.stream)].at(size_t(wait.count) - 1);
      raise(clock, other);
      if (queued(op.stream) && !queued(wait.stream)) raise(filled, other);
    }
    if (queued(op.stream)) raise(clock, filled);
    if (op.kind->exchange) {
      const bool sends = op.stream == Stream::send, receives = op.stream == Stream::receive;
      steps.push_back({.what = sends      ? passed(program[op.inputs[0]], op)
                               : receives ? passed(program[op.outputs[0]], op)
                                          : described(program, op),
                       .axis = op.attributes.string("axis"),
                       .stream = op.stream,
                       .after = clock,
                       .offset = sends || receives ? int(op.attributes.integer("offset")) : 0});
      ++clock[size_t(op.stream)];
    }
    mine.push_back(clock);
  }
  return steps;
}

void require_agreement(std::span<const RankExchanges> ranks) { Job(ranks).run(); }

std::string text_of(const std::vector<ExchangeStep>& steps) {
  Json::Array list;
  for (const ExchangeStep& step : steps) {
    Json::Array after;
    for (int32_t count : step.after) after.push_back(int64_t{count});
    list.push_back(Json::Array{step.what, step.axis, int64_t(step.stream), after, int64_t{step.offset}});
  }
  return Json(list).dump();
}

std::vector<ExchangeStep> exchanges_from(const std::string& text) {
  std::vector<ExchangeStep> steps;
  const Json list = Json::parse(text, "exchanges of a rank");
  for (const Json& one : list.array("exchanges")) {
    const Json::Array& fields = one.array("exchange");
    if (fields.size() != 5) throw Error("exchanges of a rank: not five fields.", ExitCode::failed);
    const int64_t stream = fields[2].integer("stream");
    const Json::Array& after = fields[3].array("after");
    if (stream < 0 || stream >= kStreams || after.size() != size_t(kStreams))
      throw Error("exchanges of a rank: streams of another build.", ExitCode::failed);
    ExchangeStep step{
        fields[0].string("what"), fields[1].string("axis"), Stream(stream), {}, int(fields[4].integer("offset"))};
    for (size_t s = 0; s < after.size(); ++s) step.after[s] = int32_t(after[s].integer("count"));
    steps.push_back(std::move(step));
  }
  return steps;
}

}  // namespace strata
