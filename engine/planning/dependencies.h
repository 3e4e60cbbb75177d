// Which ops of other streams an op has to wait for, so that streams need no guessing at run time.
// Follows bytes, not tensors, so reuse of memory across streams is covered like any other conflict. A step is a loop:
// where steps overlap, ops also wait for ops of the step before.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "engine/planning/memory_plan.h"

namespace strata {

// "Stream s must have finished its first `count` ops." 0 or less: ops of the step before, all but the last `-count`.
struct Wait {
  Stream stream;
  int32_t count;
};

// How many ops have finished, by stream.
using VectorClock = std::array<int32_t, kStreams>;

inline void raise(VectorClock& clock, const VectorClock& other) {
  for (size_t s = 0; s < clock.size(); ++s) clock[s] = std::max(clock[s], other[s]);
}

// What each op waits for, one list after the other. No lists at all: none waits.
class Waits {
 public:
  Waits() = default;
  Waits(const std::vector<std::vector<Wait>>& by_op) {
    for (const std::vector<Wait>& waits : by_op) push_back(waits);
  }
  std::span<const Wait> operator[](size_t op) const {
    if (op + 1 >= first_.size()) return {};
    return {waits_.data() + first_[op], waits_.data() + first_[op + 1]};
  }
  void push_back(std::span<const Wait> of_next_op) {
    waits_.insert(waits_.end(), of_next_op.begin(), of_next_op.end());
    first_.push_back(uint32_t(waits_.size()));
  }

 private:
  std::vector<uint32_t> first_{0};  // by op: of its waits
  std::vector<Wait> waits_;
};

// A range of bytes that an op reads or writes. The arenas of all tiers lie on one line, far apart.
struct Access {
  int64_t begin = 0, end = 0;
  bool write = false;
};

using AccessesOf = std::function<std::vector<Access>(int32_t op)>;

// waits[i]: for op i, what is not already implied by the order of its own stream and by earlier waits.
Waits plan_waits(const Program& program, const AccessesOf& accesses);

// The ranges of an op: its tensors and its workspace, where the plan put them; for the NVMe tier's moves whole blocks.
std::vector<Access> accesses_of(const Program& program, const MemoryPlan& plan, int32_t op);

Waits plan_waits(const Program& program, const MemoryPlan& plan);

// The waits of steps that follow each other.
struct StepWaits {
  Waits waits;
  VectorClock awaited{};  // how many ops of each stream must be over before the next step may begin
};

// Steps that overlap: the next one begins when all is there that the host looks at between two steps, and all is read
// that it writes for the next; what is left of the other streams goes on behind it, and ops wait for what they touch.
StepWaits plan_overlapping_waits(const Program& program, const MemoryPlan& plan);
// What is awaited there: compute; exchanges, since the host has some of its own; what writes a step output or a number
// that lasts, which hooks may read; what reads data. Numbers that the host alone writes are held twice (executor.h) for
// threads; what a device's copies read of them is awaited.
VectorClock awaited_by_host(const Program& program);

// How many ops each stream has.
VectorClock ops_by_stream(const Program& program);
// Whether the steps of a training run overlap: where threads of the host run all streams, and on a device where they
// run some: updates beside states on the host, reads and writes of the NVMe tier. Of other programs a device makes one
// graph.
bool steps_overlap(const Program& program);
// A number that the host may set before a step and that no op changes.
std::vector<bool> set_by_host(const Program& program);

}  // namespace strata
