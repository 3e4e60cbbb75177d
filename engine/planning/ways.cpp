// Planning in each way, and the choice; see ways.h.
#include "engine/planning/ways.h"

#include <exception>
#include <optional>

namespace strata {
namespace {

// Of a step, on average over those that go round the phases of a run.
double seconds_of_step(const RunPlans& plans) {
  constexpr int64_t kMostSteps = 10'000;
  const int64_t steps = plans.phases.programs() == 1 ? 1 : kMostSteps;
  double sum = 0;
  for (int64_t step = 1; step <= steps; ++step) {
    const auto& prediction = plans.programs[plans.of_step(step)].prediction;
    if (prediction) sum += prediction->seconds;
  }
  return sum / double(steps);
}

PlannedWay planned(const Way& way, const RunPlans& plans) {
  PlannedWay result{.name = way.name, .seconds = seconds_of_step(plans)};
  result.bytes = plans.main().arena_bytes;
  return result;
}

bool takes_more(const PlannedWay& way, const PlannedWay& plain) {
  return way.bytes[size_t(Tier::device)] > plain.bytes[size_t(Tier::device)] ||
         way.bytes[size_t(Tier::host)] > plain.bytes[size_t(Tier::host)];
}

}  // namespace

std::vector<Way> ways_of(std::span<const NamedPlugin> plugins, const BatchShape& batch, const Mesh& mesh) {
  constexpr size_t kMost = 16;
  std::vector<Way> ways{{}};
  for (const NamedPlugin& named : plugins) {
    const std::vector<std::string> own = named.plugin->ways(batch, mesh);
    if (own.empty()) continue;
    std::vector<Way> all;
    for (const Way& way : ways)
      for (size_t n = 0; n < own.size(); ++n) {
        all.push_back(way);
        all.back().name += (way.name.empty() ? "" : ", ") + named.name + ": " + own[n];
        all.back().of_plugins.emplace_back(named.plugin, n);
      }
    ways = std::move(all);
    if (ways.size() > kMost)
      throw Error("plugins offer " + std::to_string(ways.size()) + " ways to plan the run, and at most " +
                  std::to_string(kMost) + " are tried; say in the plugins' options which one is to be taken.");
  }
  return ways;
}

RunPlans plan_fastest(std::span<const Way> ways, bool bounded, const std::function<RunPlans()>& plan) {
  if (ways.size() == 1) return plan();
  std::vector<PlannedWay> tried;
  std::optional<RunPlans> best;
  size_t taken = 0;
  std::exception_ptr refused;
  std::optional<BudgetError> short_of;
  for (const Way& way : ways) {
    for (const auto& [plugin, number] : way.of_plugins) plugin->take_way(number);
    const bool plain = tried.empty();
    try {
      RunPlans plans = plan();
      tried.push_back(planned(way, plans));
      const bool allowed =
          bounded || plain || !tried.front().refusal.empty() || !takes_more(tried.back(), tried.front());
      if (allowed && (!best || tried.back().seconds < tried[taken].seconds)) {
        best = std::move(plans);
        taken = tried.size() - 1;
      }
    } catch (const BudgetError& error) {
      tried.push_back({.name = way.name, .refusal = error.what()});
      if (!refused) refused = std::current_exception(), short_of = error;
      if (short_of && error.tier() == short_of->tier() && error.smallest() < short_of->smallest())
        refused = std::current_exception(), short_of = error;
    } catch (const Error& error) {
      if (plain) throw;
      tried.push_back({.name = way.name, .refusal = error.what()});
    }
  }
  if (!best) std::rethrow_exception(refused);
  for (const auto& [plugin, number] : ways[taken].of_plugins) plugin->take_way(number);
  tried[taken].taken = true;
  best->ways = std::move(tried);
  return std::move(*best);
}

}  // namespace strata
