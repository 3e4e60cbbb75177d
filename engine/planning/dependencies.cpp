// Conflicts over byte ranges with vector clocks; see dependencies.h.
#include "engine/planning/dependencies.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory_resource>

namespace strata {
namespace {

// Last writer and last readers of each byte range; ranges are split where accesses begin and end.
class Ranges {
 public:
  Ranges() { state_[0] = {}; }
  // Calls visit(write clock, read clock) for every piece of [begin, end).
  template <class Visit>
  void over(int64_t begin, int64_t end, Visit&& visit) {
    split(begin);
    split(end);
    for (auto at = state_.find(begin); at != state_.end() && at->first < end; ++at) visit(at->second);
  }
  void written(int64_t begin, int64_t end, const VectorClock& clock) {
    if (begin == end) return;  // a rank's share may be empty
    split(begin);
    split(end);
    state_.erase(state_.lower_bound(begin), state_.lower_bound(end));
    state_[begin] = {clock, {}};
  }
  struct Clocks {
    VectorClock write{}, read{};
  };

 private:
  void split(int64_t at) {
    const auto next = state_.upper_bound(at);
    const auto piece = std::prev(next);
    if (piece->first != at) state_.emplace_hint(next, at, piece->second);
  }
  std::pmr::unsynchronized_pool_resource memory_;
  std::pmr::map<int64_t, Clocks> state_{&memory_};
};

}  // namespace

Waits plan_waits(const Program& program, const std::function<std::vector<Access>(int32_t)>& accesses) {
  Waits waits;
  const auto on_compute = [](const Op& op) { return op.stream == Stream::compute; };
  if (std::all_of(program.ops.begin(), program.ops.end(), on_compute)) return waits;
  Ranges ranges;
  std::array<VectorClock, kStreams> seen{};  // what each stream knows to be finished
  std::array<int32_t, kStreams> issued{};
  std::array<std::vector<VectorClock>, kStreams> after;  // what is known once op n of a stream has finished
  for (int32_t i = 0; i < int32_t(program.ops.size()); ++i) {
    const int stream = int(program.ops[i].stream);
    VectorClock needed{};
    const std::vector<Access> list = accesses(i);
    for (const Access& access : list)
      ranges.over(access.begin, access.end, [&](const Ranges::Clocks& piece) {
        raise(needed, piece.write);
        if (access.write) raise(needed, piece.read);
      });
    VectorClock& clock = seen[stream];
    std::vector<Wait> own;
    for (int s = 0; s < kStreams; ++s)
      if (s != stream && needed[s] > clock[s]) {
        own.push_back({Stream(s), needed[s]});
        raise(clock, after[s][needed[s] - 1]);
      }
    waits.push_back(own);
    VectorClock mine{};
    mine[stream] = clock[stream] = ++issued[stream];
    after[stream].push_back(clock);
    for (const Access& access : list)
      if (access.write) ranges.written(access.begin, access.end, mine);
    for (const Access& access : list)
      if (!access.write) ranges.over(access.begin, access.end, [&](Ranges::Clocks& piece) { raise(piece.read, mine); });
  }
  return waits;
}

std::vector<Access> accesses_of(const Program& program, const MemoryPlan& plan, int32_t index) {
  constexpr int kTierShift = 56;
  const auto place = [](Tier tier, int64_t offset) { return (int64_t(tier) << kTierShift) + offset; };
  const auto buffer = [&](const Buffer& b, int64_t bytes, bool write) {
    const int64_t begin = place(b.tier, plan[b.tier].persistent_bytes + b.offset);
    return Access{begin, begin + bytes, write};
  };
  const Op& op = program.ops[index];
  // The disk moves whole blocks: a read overwrites what is behind the tensor in its last one, where a part of another
  // tensor may lie that does not reach back to the block's beginning.
  const auto on_disk = [&](TensorId id) {
    if (!id) return false;
    return Tier::nvme == (program[id].persistent ? program[id].home : plan.buffers[plan.buffer_of[id.value]].tier);
  };
  const bool in_blocks = std::any_of(op.inputs.begin(), op.inputs.end(), on_disk) ||
                         std::any_of(op.outputs.begin(), op.outputs.end(), on_disk);
  const auto tensor = [&](TensorId id, bool write) {
    const int64_t block = in_blocks ? kStorageAlignment : 1;
    const int64_t bytes = (program[id].bytes() + block - 1) / block * block;
    if (!program[id].persistent) {
      Access access = buffer(plan.buffers[plan.buffer_of[id.value]], bytes, write);
      access.begin += program[id].part_offset;
      access.end += program[id].part_offset;
      return access;
    }
    const int64_t begin = place(program[id].home, plan.persistent_offset.at(id.value) + program[id].part_offset);
    return Access{begin, begin + bytes, write};
  };
  std::vector<Access> list;
  for (TensorId id : op.inputs)
    if (id) list.push_back(tensor(id, false));
  for (TensorId id : op.outputs) list.push_back(tensor(id, true));
  if (const int32_t w = plan.workspace_of[index]; w >= 0)
    list.push_back(buffer(plan.buffers[w], plan.buffers[w].bytes, true));
  return list;
}

Waits plan_waits(const Program& program, const MemoryPlan& plan) {
  return plan_waits(program, [&](int32_t i) { return accesses_of(program, plan, i); });
}

}  // namespace strata
