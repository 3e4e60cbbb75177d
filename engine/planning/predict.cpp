// One pass over the program with a clock a stream; see predict.h.
#include "engine/planning/predict.h"

#include <algorithm>
#include <numeric>

#include "engine/planning/dependencies.h"

namespace strata {

double Stalls::total() const { return std::accumulate(waited.begin(), waited.end(), restoring); }

Prediction predict(const Program& program, const MemoryPlan& plan, const Rates& rates) {
  const auto waits = plan_waits(program, plan);
  Prediction result;
  result.spans.resize(program.ops.size());
  std::array<std::vector<double>, kStreams> finished;  // by stream: when its op n was done
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    auto& own = finished[int(op.stream)];
    const double free = own.empty() ? 0 : own.back();
    double start = free;
    Stream last = op.stream;
    for (const Wait& wait : waits[i])
      if (const double ready = finished[int(wait.stream)][size_t(wait.count) - 1]; ready > start)
        start = ready, last = wait.stream;
    if (op.stream == Stream::compute) result.stalls.waited[int(last)] += start - free;
    const double seconds = seconds_of(OpView(program, op), rates);
    if (op.stream == Stream::compute && op.purpose == Purpose::restore) result.stalls.restoring += seconds;
    result.spans[i] = {start, start + seconds};
    own.push_back(start + seconds);
    result.seconds = std::max(result.seconds, start + seconds);
  }
  return result;
}

}  // namespace strata
