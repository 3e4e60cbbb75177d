// Measures how long this machine's kernels take: the ops of a program, each run by itself on memory made up for it. Any
// kind can be measured so, those of plugins too.
#pragma once
#include <string>
#include <vector>

#include "engine/planning/rates.h"

namespace strata {

// An op by itself, with tensors of its own: as large as it is in its program or, where that is too large to be run for
// a measurement, made smaller in the largest of its dimensions.
struct LoneOp {
  Program program;   // of that op alone
  std::string name;  // kernel_name
  Cost cost;
  double expected = 0;  // seconds, were its kernel ideal
  double weight = 0;    // seconds that all ops like it take in a step, were they ideal
  OpView view() const { return OpView(program, program.ops.front()); }
};

// The ops of the compute and host streams that differ in kind, type or cost, those of resting forms among them, those
// first that a step spends most of its time with. Ops that cannot be made small enough are left out.
std::vector<LoneOp> lone_ops(const Program& program, const Rates& rates);

struct KernelTime {
  double seconds = 0;      // 0: not run
  bool disturbed = false;  // in every try other programs had the processors: less what threads waited for them
  bool operator==(const KernelTime&) const = default;
};

// Runs each op a few times in two rounds, until `seconds` are over, and gives the fewest seconds of each, in the order
// of `ops`, those of a try that nothing disturbed first. `may_be_disturbed`: false where threads that wait for a
// processor are what the run will be, since its ranks have more threads than there are processors. Kernels are those of
// a backend that is not asynchronous. Each run has other memory than the one before, in turns through as much as
// `working_set` (bytes; what a step of the program uses), up to a few times the last cache: what would be in a cache in
// a step is in it here.
std::vector<KernelTime> measure_kernels(const std::vector<LoneOp>& ops, const std::string& backend, int threads,
                                        int host_threads, int64_t working_set, double seconds,
                                        bool may_be_disturbed = true);

}  // namespace strata
