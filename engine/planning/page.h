// One self-contained HTML page about the memory of one or several plans: stacked timelines of each tier by category,
// bars of what each strategy saves, and what ran when on which stream. Inline SVG and CSS; no scripts, nothing fetched.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/planning/predict.h"

namespace strata {

// One plan, or one run of it.
struct PageRun {
  std::string name;  // "plain", "recompute + offload"
  const Program* program = nullptr;
  const MemoryPlan* memory = nullptr;
  std::vector<Span> spans;  // by op: predicted or measured
  bool measured = false;    // what `spans` and `stalls` are
  Stalls stalls;
  double seconds = 0;                                     // of the step
  std::optional<double> ratio;                            // step time over the plain run's, measured
  std::optional<double> loss_difference;                  // from the plain run's after the same number of steps
  std::optional<int64_t> device_measured, host_measured;  // bytes of the arenas that were resident
};

// `title` is the heading (the configuration's name), `machine` one line about where and when. The first run is the one
// the others are compared with.
std::string memory_page(const std::string& title, const std::string& machine, std::span<const PageRun> runs);

}  // namespace strata
