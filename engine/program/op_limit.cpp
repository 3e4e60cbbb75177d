// The bound on a program's ops; see op_limit.h.
#include "engine/program/op_limit.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "strata/error.h"
#include "strata/tensor.h"

namespace strata {
namespace {

int64_t memory_bytes() {
  int64_t bytes = int64_t(sysconf(_SC_PHYS_PAGES)) * int64_t(sysconf(_SC_PAGESIZE));
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    bytes = std::min(bytes, int64_t(std::min<rlim_t>(limit.rlim_cur, INT64_MAX)));
  return bytes;
}

}  // namespace

int64_t most_ops() {
  static const int64_t most = std::clamp<int64_t>(memory_bytes() / kPlanningBytes, 1, kMostOps);
  return most;
}

void require_room_for_ops(double ops, const std::string& what, const std::string& remedy) {
  if (ops <= double(most_ops())) return;
  char count[32];
  std::snprintf(count, sizeof count, "%.0f", ops);
  throw Error(what + " has " + count + " ops or more, but " + std::to_string(most_ops()) + " can be planned " +
              (most_ops() < kMostOps ? "in this machine's memory of " + bytes_text(memory_bytes()) : "at most") + "; " +
              remedy);
}

}  // namespace strata
