// Whether the waits of a program order all that has to be ordered: by brute force and apart from plan_waits, which they
// come from. Any two ops that touch a byte in common, one of them writing it, must not run at the same time.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/planning/dependencies.h"

namespace strata::test {

// Bytes of one tier's arena.
struct Touched {
  Tier tier;
  int64_t begin, end;
  bool written;
  std::string name;
};

// What running an op touches. NVMe moves whole blocks: a read from it writes its buffer to the end of the last one.
inline std::vector<Touched> touched_by(const Program& program, const MemoryPlan& plan, size_t index) {
  const Op& op = program.ops[index];
  const auto on_disk = [&](TensorId id) { return id && program[program.whole(id)].home == Tier::nvme; };
  const bool blocks = std::any_of(op.inputs.begin(), op.inputs.end(), on_disk) ||
                      std::any_of(op.outputs.begin(), op.outputs.end(), on_disk);
  std::vector<Touched> all;
  const auto add = [&](TensorId id, bool written) {
    if (!id) return;
    const Tensor& tensor = program[id];
    const Tensor& whole = program[program.whole(id)];
    const int32_t buffer = plan.buffer_of[size_t(program.whole(id).value)];
    const int64_t base = whole.persistent ? plan.persistent_offset.at(program.whole(id).value)
                                          : plan[whole.home].persistent_bytes + plan.buffers[size_t(buffer)].offset;
    const int64_t begin = base + tensor.part_offset;
    int64_t bytes = tensor.bytes();
    if (blocks) bytes = (bytes + kStorageAlignment - 1) / kStorageAlignment * kStorageAlignment;
    all.push_back({whole.home, begin, begin + bytes, written, tensor.name});
  };
  for (TensorId id : op.inputs) add(id, false);
  for (TensorId id : op.outputs) add(id, true);
  if (op.purpose == Purpose::again) add(program.again_if, false);
  if (const int32_t w = plan.workspace_of[index]; w >= 0) {
    const Buffer& buffer = plan.buffers[size_t(w)];
    const int64_t begin = plan[buffer.tier].persistent_bytes + buffer.offset;
    all.push_back({buffer.tier, begin, begin + buffer.bytes, true, name_of(buffer, program)});
  }
  return all;
}

// Of each op those that are certain to be over when it begins, a bit for each op before it.
class Over {
 public:
  explicit Over(size_t ops) : ops_(ops), words_((ops + 63) / 64), bits_(ops * words_) {}
  size_t size() const { return ops_; }
  // `before` is over when `op` begins, and so is what was over when `before` began.
  void add(size_t op, size_t before) {
    uint64_t* const to = bits_.data() + op * words_;
    const uint64_t* const from = of(before);
    for (size_t w = 0, words = before / 64 + 1; w < words; ++w) to[w] |= from[w];
    to[before / 64] |= uint64_t(1) << before % 64;
  }
  // Of the ops before `op` those that may still run when it begins.
  template <class Visit>
  void each_open(size_t op, const Visit& visit) const {
    for (size_t first = 0; first < op; first += 64) {
      uint64_t open = ~of(op)[first / 64];
      if (op - first < 64) open &= (uint64_t(1) << (op - first)) - 1;
      for (; open; open &= open - 1) visit(first + size_t(std::countr_zero(open)));
    }
  }

 private:
  const uint64_t* of(size_t op) const { return bits_.data() + op * words_; }
  size_t ops_, words_;
  std::vector<uint64_t> bits_;
};

// Of the ops of `steps` steps after each other. `awaited`: how many of each stream are over when the next step begins.
inline Over over_before(const Program& program, const Waits& waits, int steps = 1, const VectorClock& awaited = {}) {
  const size_t count = program.ops.size();
  Over over(count * size_t(steps));
  std::vector<std::vector<size_t>> streams(kStreams);
  const VectorClock counts = ops_by_stream(program);
  for (size_t i = 0; i < over.size(); ++i) {
    const size_t step = i / count;
    const Op& op = program.ops[i % count];
    std::vector<size_t>& stream = streams[size_t(op.stream)];
    const bool begins_step = stream.empty() || stream.back() / count < step;
    if (!stream.empty()) over.add(i, stream.back());
    for (const Wait& wait : waits[i % count]) {
      const int64_t of_all = int64_t(step) * counts[size_t(wait.stream)] + wait.count;
      if (of_all > 0) over.add(i, streams[size_t(wait.stream)].at(size_t(of_all) - 1));
    }
    for (size_t s = 0; step > 0 && begins_step && s < awaited.size(); ++s)
      if (awaited[s] > 0) over.add(i, streams[s].at(size_t(counts[s]) * (step - 1) + size_t(awaited[s]) - 1));
    stream.push_back(i);
  }
  return over;
}

// What two ops of one program share in a way that does not let them run at once.
inline void expect_order(const Program& program, const Over& over, const std::vector<std::vector<Touched>>& touched) {
  const size_t count = program.ops.size();
  int told = 0;
  for (size_t i = 0; i < over.size(); ++i)
    over.each_open(i, [&](size_t k) {
      for (const Touched& a : touched[k % count])
        for (const Touched& b : touched[i % count])
          if ((a.written || b.written) && a.tier == b.tier && a.begin < b.end && b.begin < a.end && ++told <= 5) {
            const Op &first = program.ops[k % count], &second = program.ops[i % count];
            ADD_FAILURE() << "nothing orders op " << k % count << " (" << first.kind->name << " on the stream "
                          << name_of(first.stream) << ", " << (a.written ? "writes " : "reads ") << a.name
                          << ") before op " << i % count << (i / count > k / count ? " of the next step (" : " (")
                          << second.kind->name << " on the stream " << name_of(second.stream) << ", "
                          << (b.written ? "writes " : "reads ") << b.name << "), which share bytes from "
                          << std::max(a.begin, b.begin) << " of the tier " << name_of(a.tier);
          }
    });
}

// Within a step, and where steps overlap (threads run all streams) over two of them: then what the host looks at
// between steps has been written, and what it writes has been read.
inline void expect_ordered(const Program& program, const MemoryPlan& plan) {
  std::vector<std::vector<Touched>> touched;
  for (size_t i = 0; i < program.ops.size(); ++i) touched.push_back(touched_by(program, plan, i));
  expect_order(program, over_before(program, plan_waits(program, plan)), touched);
  if (!steps_overlap(program)) return;
  const StepWaits steps = plan_overlapping_waits(program, plan);
  expect_order(program, over_before(program, steps.waits, 2, steps.awaited), touched);
  VectorClock begun{};
  for (const Op& op : program.ops) {
    const bool awaited = ++begun[size_t(op.stream)] <= steps.awaited[size_t(op.stream)];
    const auto of_host = [&](TensorId id, bool written) {
      if (!id) return false;
      const Tensor& whole = program[program.whole(id)];
      return written ? program[id].step_output || whole.step_output
                     : whole.role == Role::data && !whole.persistent && !whole.copy_of;
    };
    for (TensorId id : op.outputs) {
      EXPECT_TRUE(awaited || !of_host(id, true)) << program[id].name << " is read by the host before it is written";
    }
    for (TensorId id : op.inputs) {
      EXPECT_TRUE(awaited || !of_host(id, false)) << program[id].name << " is written by the host before it is read";
    }
  }
}

}  // namespace strata::test
