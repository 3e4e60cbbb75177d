// Tells whether a measurement was disturbed: how long this process's threads were ready to run while other programs had
// the processors (Linux: /proc/self/task/*/schedstat; Documentation/scheduler/sched-stats.rst of the kernel).
#pragma once
#include <cstdint>
#include <map>

namespace strata {

class ProcessorWait {
 public:
  ProcessorWait();
  // Of the time since this object was made, the share that the thread which waited longest was kept waiting: 0 to 1. A
  // thread that began since then counts from its beginning. 0 where the kernel does not tell.
  double share() const;

 private:
  double began_;
  std::map<int64_t, double> before_;  // seconds waited, by thread
};

// A measurement during which threads waited longer than this share of it says little about the machine.
inline constexpr double kDisturbed = 0.1;

}  // namespace strata
