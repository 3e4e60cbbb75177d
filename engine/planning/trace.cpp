// Spans to trace events; see trace.h.
#include "engine/planning/trace.h"

#include <fmt/format.h>

#include <iterator>

#include "strata/json.h"

namespace strata {

std::string chrome_trace(const Program& program, const MemoryPlan& plan, const std::vector<Span>& spans) {
  std::string text = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
  const auto out = std::back_inserter(text);
  for (int s = 0; s < kStreams; ++s)
    fmt::format_to(out, R"({{"ph": "M", "name": "thread_name", "pid": 1, "tid": {}, "args": {{"name": "{}"}}}},{})", s,
                   name_of(Stream(s)), "\n");
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    const std::string made = op.outputs.empty() ? "" : program[op.outputs.front()].name;
    fmt::format_to(
        out,
        R"({{"ph": "X", "name": {}, "cat": "{}", "pid": 1, "tid": {}, "ts": {:.3f}, "dur": {:.3f}, "args": {{"op": {}, "writes": {}, "purpose": "{}", "microbatch": {}, "block": {}}}}},{})",
        Json(op.kind->name).dump(), name_of(op.step_part), int(op.stream), spans[i].start * 1e6,
        (spans[i].finish - spans[i].start) * 1e6, i, Json(made).dump(), name_of(op.purpose), op.microbatch, op.block,
        "\n");
  }
  for (int t = 0; t < kTiers; ++t) {
    const TierPlan& tier = plan.tiers[t];
    if (tier.total_bytes() == 0) continue;
    const std::vector<Ledger> live = timeline(program, plan, Tier(t));
    for (size_t i = 0; i < live.size(); ++i) {
      if (program.ops[i].stream != Stream::compute) continue;
      int64_t bytes = tier.persistent_bytes;
      for (int64_t role : live[i]) bytes += role;
      fmt::format_to(out, R"({{"ph": "C", "name": "{} bytes", "pid": 1, "ts": {:.3f}, "args": {{"alive": {}}}}},{})",
                     name_of(Tier(t)), spans[i].start * 1e6, bytes, "\n");
    }
  }
  fmt::format_to(out, R"({{"ph": "M", "name": "process_name", "pid": 1, "args": {{"name": "strata step"}}}})");
  return text + "\n]}\n";
}

}  // namespace strata
