// What a run left in its log.jsonl, read back: for reports on one run or several.
#pragma once
#include <map>
#include <string>
#include <vector>

namespace strata {

// Of one quantity, in the order of the steps that have it.
struct Curve {
  std::vector<double> steps, values;
};

struct RunHistory {
  std::string name;                                  // as the user gave it
  std::map<std::string, Curve> curves{};             // by the log's name: "loss", "tokens_per_second"
  std::vector<double> steps{}, tokens{}, seconds{};  // of every step: its number, and tokens and seconds so far

  const Curve* find(const std::string& name) const;  // null where no step has it
  double last(const std::string& name) const;        // NaN where there is none, as for the next three
  double least(const std::string& name) const;
  double most(const std::string& name) const;
  double median(const std::string& name) const;
};

// `path`: a run's folder, or a log. Only the last line may lack its end: it is still being written. Throws Error
// (usage) with file and line where something else is no line of a log, and where there is no log or no step in it.
RunHistory read_history(const std::string& path);

}  // namespace strata
