// `strata verify`: a configuration as it is, each of its plugins alone, and each pair, held to what they say.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "engine/verify/judge.h"
#include "strata/json.h"

namespace strata::verifying {

struct Report {
  std::string program;            // what the plain program is, and on which data
  std::vector<Verdict> verdicts;  // the whole first
  std::vector<Verdict> failures;  // the smallest sets that are outside
  bool passed() const { return failures.empty(); }
};

// `said` is called with each verdict as it comes. Throws Error where the configuration cannot run, or not plainly.
Report verify(const Setup& setup, const std::function<void(const Verdict&)>& said = {});

std::string_view name_of(Verdict::Kind kind);
std::string mesh_text(const Trial& trial);         // "data=2 tensor=2 reproducible"
std::string outcome_text(const Verdict& verdict);  // "within: loss of step 3 differs by 1.0e-07 of 4.0e-06"
Json to_json(const Verdict& verdict);
std::string line_of(const Verdict& verdict);     // of a table
std::string failure_of(const Verdict& verdict);  // "recompute, over data=2: …", with the step and the tensor
std::string json_of(const Report& report);

}  // namespace strata::verifying
