// The one exception for what a user can mend, and where it points.
// Not for our own mistakes: those are STRATA_CHECK, which says "internal error" and where.
#pragma once
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace strata {

// A position in a file the user wrote. Line and column count from 1; 0 means unknown.
struct Place {
  std::string file;
  int line = 0;
  int column = 0;
  std::string text() const;  // "file:line:column", leaving out what is unknown; empty when nothing is known
};

// Process exit status: kUsage for wrong usage, configuration or input, kFailed for a run that could not go on.
enum class ExitCode { done = 0, failed = 1, usage = 2 };

// One or two sentences: what happened, where, and what to do.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, ExitCode code = ExitCode::usage);
  Error(const Place& place, const std::string& message, ExitCode code = ExitCode::usage);
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

// The candidate nearest to `name` by edit distance, or empty when none is near enough to be a slip of the keys.
std::string nearest(std::string_view name, const std::vector<std::string>& candidates);
// " Did you mean \"x\"?" for the nearest candidate, or "".
std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates);

[[noreturn]] void internal_error(const char* condition, const char* file, int line);

}  // namespace strata

#define STRATA_CHECK(condition)                                                 \
  do {                                                                          \
    if (!(condition)) ::strata::internal_error(#condition, __FILE__, __LINE__); \
  } while (false)
