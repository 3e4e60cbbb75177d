// Error texts and "did you mean" (strata/error.h).
#include "strata/error.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace strata {
namespace {

// Levenshtein distance.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string Place::text() const {
  std::string result = file;
  if (line > 0) result.append(":").append(std::to_string(line));
  if (line > 0 && column > 0) result.append(":").append(std::to_string(column));
  return result;
}

Error::Error(const std::string& message, ExitCode code) : std::runtime_error(message), code_(code) {}

Error::Error(const Place& place, const std::string& message, ExitCode code)
    : std::runtime_error(place.text().empty() ? message : place.text() + ": " + message), code_(code) {}

std::string nearest(std::string_view name, const std::vector<std::string>& candidates) {
  std::string best;
  size_t least = std::max<size_t>(1, std::min<size_t>(3, name.size() / 2)) + 1;
  for (const std::string& candidate : candidates)
    if (const size_t distance = edit_distance(name, candidate); distance < least) {
      least = distance;
      best = candidate;
    }
  return best;
}

std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates) {
  const std::string best = nearest(name, candidates);
  return best.empty() ? "" : " Did you mean \"" + best + "\"?";
}

void internal_error(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "strata: internal error: %s does not hold at %s:%d; please report it.\n", condition, file, line);
  std::abort();
}

}  // namespace strata
