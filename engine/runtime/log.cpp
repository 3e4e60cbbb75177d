// JSON lines and the progress line; see log.h.
#include "engine/runtime/log.h"

#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "strata/error.h"

namespace strata {
namespace {

// The value of "step" at the start of a line this class wrote, or -1.
int64_t step_of(const std::string& line) {
  long long step = -1;
  return std::sscanf(line.c_str(), "{\"step\": %lld", &step) == 1 ? step : -1;
}

}  // namespace

StepLog::StepLog(const std::string& path, int64_t last_step) : path_(path) {
  std::string kept;
  if (std::ifstream old(path); old && last_step > 0)
    for (std::string line; std::getline(old, line);)
      if (const int64_t step = step_of(line); step >= 0 && step <= last_step) kept += line + "\n";
  file_ = std::fopen(path.c_str(), "w");
  if (!file_) throw Error(path + ": cannot write the log: " + std::strerror(errno) + ".", ExitCode::failed);
  std::fwrite(kept.data(), 1, kept.size(), file_);
}

StepLog::~StepLog() { std::fclose(file_); }

void StepLog::write(const Fields& fields) {
  std::string line = "{";
  for (const auto& [name, value] : fields) {
    char text[40] = "null";
    if (std::isfinite(value))
      std::snprintf(text, sizeof text, value == std::floor(value) && std::abs(value) < 1e15 ? "%.0f" : "%.9g", value);
    line += (line.size() > 1 ? ", \"" : "\"") + name + "\": " + text;
  }
  line += "}\n";
  std::fwrite(line.data(), 1, line.size(), file_);
  std::fflush(file_);  // a full disk loses log lines, not the run
}

Progress::Progress() : terminal_(isatty(STDERR_FILENO) || std::getenv("STRATA_TERMINAL")) {}

void Progress::show(const std::string& line) {
  constexpr double kPlainInterval = 5;  // seconds
  if (terminal_) {
    std::fprintf(stderr, "\r\033[K%s", line.c_str());
    open_ = true;
    return;
  }
  const double now = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  if (now - last_ < kPlainInterval) return;
  last_ = now;
  std::fprintf(stderr, "%s\n", line.c_str());
}

void Progress::message(const std::string& line) {
  finish();
  std::fprintf(stderr, "%s\n", line.c_str());
}

void Progress::finish() {
  if (open_) std::fputc('\n', stderr);
  open_ = false;
}

std::string duration_text(double seconds) {
  const long total = std::lround(seconds);
  char text[32];
  if (total >= 3600)
    std::snprintf(text, sizeof text, "%ld:%02ld:%02ld", total / 3600, total / 60 % 60, total % 60);
  else
    std::snprintf(text, sizeof text, "%ld:%02ld", total / 60, total % 60);
  return text;
}

}  // namespace strata
