// What `strata plan` says of the stages of a pipeline beside each other, predicted on one clock.
#pragma once
#include <span>
#include <string>

#include "engine/planning/report.h"
#include "strata/json.h"

namespace strata {

// What stages that ran together make of a step (RunPlans::usual).
struct StagesSummary {
  double seconds = 0;  // of the step
  double busiest = 0;  // the most seconds that a stage computes
  // What the step takes beyond that, as a part of it: the bubble, with whatever else stages wait for.
  double bubble() const { return busiest > 0 ? seconds / busiest - 1 : 0; }
};
StagesSummary summary_of(std::span<const RunPlans> stages);

std::string stages_text(std::span<const RunPlans> stages);
Json stages_json(std::span<const RunPlans> stages);

}  // namespace strata
