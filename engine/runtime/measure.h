// Runs a few steps of a configuration and says what they took: memory, time, stalls, losses. For benchmarks: no
// checkpoint, no log, nothing is written but the NVMe tier's file.
#pragma once
#include <string>
#include <vector>

#include "engine/runtime/session.h"

namespace strata {

struct Measurement {
  std::vector<double> losses;   // by step
  double seconds = 0;           // median of the steps after the first
  std::vector<double> steps;    // seconds of each of those, ascending
  Stalls stalls;                // of the last step
  std::vector<Span> spans;      // of the last step, by op of its program
  int64_t device_resident = 0;  // bytes of the arenas that were in memory at the end
  int64_t host_resident = 0;
  int64_t process_peak = 0;  // bytes; of the whole process
  std::string error;         // why it could not run; everything else is empty then
};

// On the training data where it can be opened, otherwise on random tokens. Throws Error.
Measurement measure(const Session& session, const RunPlans& plans, int64_t steps);

// The same in a process of its own, so that peaks are its alone. What goes wrong is in `error`.
Measurement measure_apart(const Session& session, const RunPlans& plans, int64_t steps);

}  // namespace strata
