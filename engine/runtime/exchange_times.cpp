// Groups of ops and what each took; see exchange_times.h.
#include "engine/runtime/exchange_times.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace strata {
namespace {

constexpr double kShort = 20e-6;     // seconds that clocks and wake-ups blur
constexpr size_t kMostSteps = 1000;  // that are remembered

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + int64_t(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void remember(std::vector<double>& list, double value) {
  if (list.size() == kMostSteps) list.erase(list.begin());
  list.push_back(value);
}

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
                                  .collective = op.stream != Stream::send && op.stream != Stream::receive},
                         .ops = {},
                         .fewest = {},
                         .means = {}});
    groups_[found->second].ops.push_back(i);
  }
}

void ExchangeTimes::add(const std::vector<Span>& spans) {
  for (Group& group : groups_) {
    double fewest = 0, sum = 0;
    if (group.ops.back() >= spans.size()) continue;
    for (const size_t op : group.ops) {
      const double took = std::max(0.0, spans[op].finish - spans[op].start);
      sum += took;
      if (took >= kShort) fewest = fewest > 0 ? std::min(fewest, took) : took;
    }
    if (fewest == 0) continue;
    remember(group.fewest, fewest);
    remember(group.means, sum / double(group.ops.size()));
  }
}

std::vector<ExchangeTimes::Times> ExchangeTimes::times() const {
  std::vector<Times> all;
  for (const Group& group : groups_) {
    if (group.means.empty()) continue;
    Times& times = all.emplace_back(group.what);
    times.fewest = median_of(group.fewest), times.mean = median_of(group.means);
  }
  return all;
}

}  // namespace strata
