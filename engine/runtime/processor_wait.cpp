// Reads what the scheduler counts; see processor_wait.h.
#include "engine/runtime/processor_wait.h"

#include <algorithm>
#include <fstream>
#include <string>
#include <system_error>

#include "base/clock.h"
#include "memory/folder.h"

namespace strata {
namespace {

std::map<int64_t, double> seconds_waited() {
  std::map<int64_t, double> result;
  std::error_code problem;
  const std::string tasks = "/proc/self/task";
  for (const std::string& task : names_in(tasks, problem)) {
    std::ifstream file(tasks + "/" + task + "/schedstat");
    double ran = 0, waited = 0;  // nanoseconds
    if (file >> ran >> waited) result[std::stoll(task)] = waited * 1e-9;
  }
  return result;
}

}  // namespace

ProcessorWait::ProcessorWait() : began_(seconds_now()), before_(seconds_waited()) {}

double ProcessorWait::share() const {
  double longest = 0;
  for (const auto& [thread, seconds] : seconds_waited()) {
    const auto found = before_.find(thread);
    longest = std::max(longest, seconds - (found == before_.end() ? 0 : found->second));
  }
  const double passed = seconds_now() - began_;
  return passed > 0 ? std::clamp(longest / passed, 0.0, 1.0) : 0;
}

}  // namespace strata
