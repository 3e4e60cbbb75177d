// What a run tells: one JSON object a step in log.jsonl, and progress for a person — one live line on a terminal,
// plain lines elsewhere.
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace strata {

class StepLog {
 public:
  using Fields = std::vector<std::pair<std::string, double>>;
  // Appends to `path`; a resumed run drops the lines of steps after `last_step`, which are about to run again.
  StepLog(const std::string& path, int64_t last_step);
  ~StepLog();
  StepLog(const StepLog&) = delete;
  void write(const Fields& fields);  // integers are written without a fraction; what is not finite as null

 private:
  std::FILE* file_;
  std::string path_;
};

class Progress {
 public:
  Progress();
  void show(const std::string& line);     // the live line, or a plain line at most every few seconds
  void message(const std::string& line);  // stays
  void finish();                          // ends the live line

 private:
  bool terminal_, open_ = false;
  double last_ = -1e9;
};

std::string duration_text(double seconds);  // "1:02:03" or "2:03"

}  // namespace strata
