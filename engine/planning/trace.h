// A step as a trace for Chrome's about:tracing and ui.perfetto.dev ("Trace Event Format"): one row a stream, one slice
// an op, counters for the bytes alive on each tier.
#pragma once
#include <string>
#include <vector>

#include "engine/planning/predict.h"

namespace strata {

// `spans` by op, predicted or measured.
std::string chrome_trace(const Program& program, const MemoryPlan& plan, const std::vector<Span>& spans);

}  // namespace strata
