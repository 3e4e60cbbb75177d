// What `strata plan` says: memory by category, the peak and what makes it, and the work of a step. Text and JSON.
#pragma once
#include <string>

#include "engine/planning/build.h"
#include "engine/planning/memory_plan.h"

namespace strata {

std::string plan_text(const BuiltProgram& built, const MemoryPlan& plan);
std::string plan_json(const BuiltProgram& built, const MemoryPlan& plan);

}  // namespace strata
