// What a run tells: one JSON object a step in log.jsonl, and progress for a person — one live line on a terminal,
// plain lines elsewhere.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace strata {

class StepLog {
 public:
  using Fields = std::vector<std::pair<std::string, double>>;
  // Appends to `path`; the first line written drops those of steps after `last_step`, which run again. Throws Error
  // where the file cannot be opened.
  StepLog(const std::string& path, int64_t last_step);
  ~StepLog();
  StepLog(const StepLog&) = delete;
  // Integers are written without a fraction; what is not finite as null. A full disk loses lines, not the run: says
  // what went wrong with the first line that is lost, else nothing.
  std::string write(const Fields& fields);
  int64_t lost() const { return lost_; }  // lines

 private:
  int file_;
  std::string path_;
  int64_t end_ = 0, lost_ = 0;  // bytes that stay; lines
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
