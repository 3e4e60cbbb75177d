// Groups of ops and what each took; see exchange_times.h.
#include "engine/runtime/exchange_times.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <span>
#include <tuple>

namespace strata {
namespace {

constexpr double kShort = 20e-6;     // seconds that clocks and wake-ups blur
constexpr size_t kTelling = 4;       // calls: the fastest of fewer may have waited, too
constexpr size_t kMostSteps = 1000;  // that are remembered

}  // namespace

ExchangeTimes::ExchangeTimes(const Program& program, const Rates& rates) {
  std::map<std::tuple<std::string, std::string, double>, size_t> known;
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    if (!is_exchange(op.stream) || !op.attributes.has("axis")) continue;
    const std::string axis = op.attributes.string("axis");
    const double bytes = wire_bytes(OpView(program, op), rates);
    if (!(bytes > 0)) continue;
    const auto [found, is_new] = known.try_emplace({axis, op.kind->name, bytes}, groups_.size());
    if (is_new)
      groups_.push_back({.what = {.axis = axis,
                                  .kind = op.kind->name,
                                  .bytes = bytes,
                                  .tells_late = op.stream != Stream::send && op.stream != Stream::receive},
                         .ops = {}});
    groups_[found->second].ops.push_back(i);
  }
  for (Group& group : groups_) group.what.tells_late &= group.ops.size() >= kTelling;
}

void ExchangeTimes::add(const std::vector<Span>& spans) {
  if (spans.empty()) return;
  Step step;
  for (const Group& group : groups_) {
    double fewest = HUGE_VAL, sum = 0;
    for (const size_t op : group.ops) {
      const double took = std::max(0.0, spans.at(op).finish - spans.at(op).start);
      sum += took;
      if (took >= kShort) fewest = std::min(fewest, took);
    }
    step.seconds += sum;
    step.fewest.push_back(fewest);
    step.means.push_back(sum / double(group.ops.size()));
  }
  if (steps_.size() == kMostSteps) steps_.erase(steps_.begin());
  steps_.push_back(std::move(step));
}

std::vector<ExchangeTimes::Times> ExchangeTimes::times() const {
  std::vector<const Step*> steps;
  for (const Step& step : steps_) steps.push_back(&step);
  std::sort(steps.begin(), steps.end(), [](const Step* a, const Step* b) { return a->seconds < b->seconds; });
  const size_t quarter = steps.size() / 4;
  const std::span<const Step* const> middle(steps.data() + quarter, steps.size() - 2 * quarter);
  std::vector<Times> all;
  for (size_t g = 0; g < groups_.size(); ++g) {
    Times times = groups_[g].what;
    double count = 0;
    for (const Step* step : middle) {
      if (step->fewest[g] == HUGE_VAL) continue;
      times.fewest += step->fewest[g], times.mean += step->means[g], ++count;
    }
    if (count == 0) continue;
    times.fewest /= count, times.mean /= count;
    all.push_back(std::move(times));
  }
  return all;
}

}  // namespace strata
