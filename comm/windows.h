// A group of ranks that share a block of memory: threads of one process, or processes of one host.
// Data goes through small windows of that block, which stay in the processors' caches.
#pragma once
#include <atomic>
#include <functional>
#include <memory>

#include "strata/communicator.h"
#include "strata/error.h"

namespace strata {

// How a group ends early. One for all groups of a world; the text is written before the flag.
struct AbortFlag {
  std::atomic<uint32_t> raised{0};
  char text[508] = {};
  void raise(std::string_view what);  // the first one counts
};

// What ends the others after an error of one rank travels as its text; the exit code goes in front of it.
std::string passed_on(std::string_view why, ExitCode code);
// The error of a rank that was ended so: `where` says what it was doing.
Error ended_by(std::string_view passed_on, const std::string& where = "");

struct WindowsOptions {
  std::string name;              // of the group, for messages: "data"
  std::vector<int> ranks;        // of the world, by rank of the group
  double timeout_seconds = 600;  // the longest wait for another rank
  int64_t chunk_bytes = 0;       // 0: chosen by the size of the group
  bool rounds_each = false;      // sums of 16 bits are rounded after each addition (reduce.h)
};

// Bytes of the shared block for a group of `size` ranks; zero to begin with.
int64_t windows_bytes(int size, const WindowsOptions& options);

// This rank's end of the block. `owner` keeps the block alive; `abort` is where this process hears of the end of
// others.
std::unique_ptr<Communicator> windows_communicator(std::byte* block, std::shared_ptr<void> owner, int rank,
                                                   WindowsOptions options, const AbortFlag& abort);

}  // namespace strata
