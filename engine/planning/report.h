// What `strata plan` says: memory by category, the peak and what makes it, and the work of a step. Text and JSON.
#pragma once
#include <optional>
#include <string>

#include "engine/planning/build.h"
#include "engine/planning/predict.h"

namespace strata {

// A program with its memory plan and, of a step that trains, what it is predicted to cost.
struct PlannedProgram {
  BuiltProgram built;
  int ranks = 1;  // that run it, each a part
  MemoryPlan memory;
  Rates rates;
  std::optional<Prediction> prediction;
  std::array<int64_t, kTiers> arena_bytes{};  // what a run takes: this program, and the validation beside training
  int64_t snapshot_bytes = 0;                 // host memory beside the arenas: state on its way to a checkpoint
  ProcessMemory process{};
  const Program& program() const { return built.program; }
};

std::string plan_text(const PlannedProgram& planned);
std::string plan_json(const PlannedProgram& planned);

// Whether compute may have to wait or to run something again.
bool may_stall(const Program& program);
// The share that model FLOPs have of what the machine could do in the time, in the type that the program computes in;
// NaN where nobody knows the peak. Of a plan with a prediction.
double model_flop_share(const PlannedProgram& planned, double seconds);
// "412 GFLOP/s", "38.2 GB/s".
std::string rate_text(double rate, const char* unit);
// The rates that a prediction used, a line each, and in the last what of them is assumed and not measured.
std::string rates_text(const PlannedProgram& planned);
// Only that: "assumed, not measured: …"; empty when all is measured.
std::string assumed_text(const Rates& rates);

}  // namespace strata
