// JSON lines and the progress line; see log.h.
#include "engine/runtime/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "base/clock.h"
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
  if (std::ifstream old(path); old && last_step > 0) {
    int64_t at = 0;
    for (std::string line; std::getline(old, line) && !old.eof();) {  // a line without an end is no line
      at += int64_t(line.size()) + 1;
      if (const int64_t step = step_of(line); step >= 0 && step <= last_step) end_ = at;
    }
  }
  file_ = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (file_ < 0) throw Error(path + ": cannot write the log: " + std::strerror(errno) + ".");
}

StepLog::~StepLog() { close(file_); }

std::string StepLog::write(const Fields& fields) {
  std::string line = "{";
  for (const auto& [name, value] : fields) {
    char text[40] = "null";
    if (std::isfinite(value))
      std::snprintf(text, sizeof text, value == std::floor(value) && std::abs(value) < 1e15 ? "%.0f" : "%.9g", value);
    line += (line.size() > 1 ? ", \"" : "\"") + name + "\": " + text;
  }
  line += "}\n";
  // What is behind the end goes first: later steps of the run before.
  errno = 0;
  if (ftruncate(file_, end_) == 0 && pwrite(file_, line.data(), line.size(), end_) == ssize_t(line.size())) {
    end_ += int64_t(line.size());
    return "";
  }
  const std::string why = errno ? std::strerror(errno) : "No space left on device";  // for a part of the line there was
  (void)!ftruncate(file_, end_);
  if (++lost_ > 1) return "";
  return path_ + ": cannot write the log: " + why + ". The run goes on, and lines are lost until this is mended.";
}

Progress::Progress() : terminal_(isatty(STDERR_FILENO) || std::getenv("STRATA_TERMINAL")) {}

void Progress::show(const std::string& line) {
  constexpr double kPlainInterval = 5;  // seconds
  if (terminal_) {
    std::fprintf(stderr, "\r\033[K%s", line.c_str());
    open_ = true;
    return;
  }
  const double now = seconds_now();
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
