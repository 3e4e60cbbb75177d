// Whether the waits of a program order all that has to be ordered: by brute force and apart from plan_waits, which they
// come from. Any two ops that touch a byte in common, one of them writing it, must not run at the same time.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
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
  if (const int32_t w = plan.workspace_of[index]; w >= 0) {
    const Buffer& buffer = plan.buffers[size_t(w)];
    const int64_t begin = plan[buffer.tier].persistent_bytes + buffer.offset;
    all.push_back({buffer.tier, begin, begin + buffer.bytes, true, name_of(buffer, program)});
  }
  return all;
}

// By op: which ops are certain to be over when it begins.
inline std::vector<std::vector<bool>> over_before(const Program& program, const Waits& waits) {
  const size_t count = program.ops.size();
  std::vector<std::vector<bool>> over(count, std::vector<bool>(count, false));
  std::vector<std::vector<size_t>> streams(kStreams);
  for (size_t i = 0; i < count; ++i) {
    const auto after = [&](size_t op) {
      for (size_t k = 0; k < op; ++k) over[i][k] = over[i][k] || over[op][k];
      over[i][op] = true;
    };
    std::vector<size_t>& stream = streams[size_t(program.ops[i].stream)];
    if (!stream.empty()) after(stream.back());
    for (const Wait& wait : waits[i]) after(streams[size_t(wait.stream)].at(size_t(wait.count) - 1));
    stream.push_back(i);
  }
  return over;
}

inline void expect_ordered(const Program& program, const MemoryPlan& plan) {
  const auto over = over_before(program, plan_waits(program, plan));
  std::vector<std::vector<Touched>> touched;
  for (size_t i = 0; i < program.ops.size(); ++i) touched.push_back(touched_by(program, plan, i));
  int told = 0;
  for (size_t i = 0; i < touched.size(); ++i)
    for (size_t k = 0; k < i && told < 5; ++k) {
      if (over[i][k]) continue;
      for (const Touched& a : touched[k])
        for (const Touched& b : touched[i])
          if ((a.written || b.written) && a.tier == b.tier && a.begin < b.end && b.begin < a.end) {
            ++told;
            ADD_FAILURE() << "nothing orders op " << k << " (" << program.ops[k].kind->name << " on the stream "
                          << name_of(program.ops[k].stream) << ", " << (a.written ? "writes " : "reads ") << a.name
                          << ") before op " << i << " (" << program.ops[i].kind->name << " on the stream "
                          << name_of(program.ops[i].stream) << ", " << (b.written ? "writes " : "reads ") << b.name
                          << "), which share bytes from " << std::max(a.begin, b.begin) << " of the tier "
                          << name_of(a.tier);
          }
    }
}

}  // namespace strata::test
