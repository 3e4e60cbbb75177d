// What `strata plan` says: memory by category, the peak and what makes it, and the work of a step. Text and JSON.
#pragma once
#include <optional>
#include <string>

#include "engine/planning/build.h"
#include "engine/planning/predict.h"

namespace strata {

// A program with its memory plan, and where residency is in play what it is predicted to cost.
struct PlannedProgram {
  BuiltProgram built;
  int ranks = 1;  // that run it, each a part
  MemoryPlan memory;
  Rates rates;
  std::optional<Prediction> prediction;
  std::array<int64_t, kTiers> arena_bytes{};  // what a run takes: this program, and the validation beside training
  int64_t snapshot_bytes = 0;                 // host memory beside the arenas: state on its way to a checkpoint
  const Program& program() const { return built.program; }
};

std::string plan_text(const PlannedProgram& planned);
std::string plan_json(const PlannedProgram& planned);

}  // namespace strata
