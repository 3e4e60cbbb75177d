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

bool all_on_compute(const Program& program) {
  return std::all_of(program.ops.begin(), program.ops.end(), [](const Op& op) { return op.stream == Stream::compute; });
}

// Goes over the ops of one step after the other.
class Conflicts {
 public:
  Conflicts(const Program& program, AccessesOf accesses) : program_(program), accesses_(std::move(accesses)) {}

  // Calls found(waits of the op), with counts from the first step on, for one op after the other.
  template <class Found>
  void step(Found&& found) {
    for (int32_t i = 0; i < int32_t(program_.ops.size()); ++i) found(waits_of(i));
  }

  // Whatever comes begins after so many ops of each stream.
  void all_await(const VectorClock& counts) {
    VectorClock known = counts;
    for (size_t s = 0; s < counts.size(); ++s)
      if (counts[s] > 0) raise(known, after_[s][size_t(counts[s]) - 1]);
    for (VectorClock& clock : seen_) raise(clock, known);
  }

 private:
  std::vector<Wait> waits_of(int32_t op) {
    const int stream = int(program_.ops[size_t(op)].stream);
    VectorClock needed{};
    const std::vector<Access> list = accesses_(op);
    for (const Access& access : list)
      ranges_.over(access.begin, access.end, [&](const Ranges::Clocks& piece) {
        raise(needed, piece.write);
        if (access.write) raise(needed, piece.read);
      });
    VectorClock& clock = seen_[size_t(stream)];
    std::vector<Wait> own;
    for (int s = 0; s < kStreams; ++s)
      if (s != stream && needed[s] > clock[s]) {
        own.push_back({Stream(s), needed[s]});
        raise(clock, after_[s][needed[s] - 1]);
      }
    VectorClock mine{};
    mine[stream] = clock[stream] = ++issued_[stream];
    after_[stream].push_back(clock);
    for (const Access& access : list)
      if (access.write) ranges_.written(access.begin, access.end, mine);
    for (const Access& access : list)
      if (!access.write)
        ranges_.over(access.begin, access.end, [&](Ranges::Clocks& piece) { raise(piece.read, mine); });
    return own;
  }

  const Program& program_;
  AccessesOf accesses_;
  Ranges ranges_;
  std::array<VectorClock, kStreams> seen_{};  // what each stream knows to be finished
  VectorClock issued_{};
  std::array<std::vector<VectorClock>, kStreams> after_;  // what is known once op n of a stream has finished
};

}  // namespace

Waits plan_waits(const Program& program, const AccessesOf& accesses) {
  Waits waits;
  if (all_on_compute(program)) return waits;
  Conflicts(program, accesses).step([&](const std::vector<Wait>& own) { waits.push_back(own); });
  return waits;
}

// Two steps are enough: what an op of the step before the last shares with one of this step, the same op of the last
// step shares too, and each op of a stream comes after itself in the step before.
StepWaits plan_overlapping_waits(const Program& program, const VectorClock& awaited, const AccessesOf& accesses) {
  StepWaits result{.waits = {}, .awaited = awaited};
  if (all_on_compute(program)) return result;
  const VectorClock counts = ops_by_stream(program);
  Conflicts conflicts(program, accesses);
  conflicts.step([](const std::vector<Wait>&) {});
  conflicts.all_await(awaited);
  conflicts.step([&](std::vector<Wait> own) {
    for (Wait& wait : own) wait.count -= counts[size_t(wait.stream)];
    result.waits.push_back(own);
  });
  return result;
}

StepWaits plan_overlapping_waits(const Program& program, const MemoryPlan& plan) {
  return plan_overlapping_waits(program, awaited_by_host(program),
                                [&](int32_t i) { return accesses_of(program, plan, i); });
}

VectorClock ops_by_stream(const Program& program) {
  VectorClock counts{};
  for (const Op& op : program.ops) ++counts[size_t(op.stream)];
  return counts;
}

bool steps_overlap(const Program& program) { return program.one_memory && !all_on_compute(program); }

std::vector<bool> set_by_host(const Program& program) {
  std::vector<bool> is_set(program.tensors.size(), false);
  for (size_t t = 0; t < is_set.size(); ++t) {
    const Tensor& tensor = program.tensors[t];
    is_set[t] = tensor.persistent && tensor.role == Role::scalar && elements(tensor.shape) == 1;
  }
  for (const Op& op : program.ops)
    for (TensorId id : op.outputs) is_set[size_t(program.whole(id).value)] = false;
  return is_set;
}

VectorClock awaited_by_host(const Program& program) {
  const std::vector<bool> held = set_by_host(program);
  const auto may_be_read = [&](TensorId id) {
    const Tensor& whole = program[program.whole(id)];
    return program[id].step_output || whole.step_output || (whole.persistent && elements(whole.shape) == 1);
  };
  const auto may_be_written = [&](TensorId id) {
    if (!id) return false;
    const TensorId whole = program.whole(id);
    return (program[whole].role == Role::data && !program[whole].copy_of) ||
           (program[whole].role == Role::scalar && !held[size_t(whole.value)]);
  };
  VectorClock counts{}, awaited{};
  for (const Op& op : program.ops) {
    const size_t stream = size_t(op.stream);
    ++counts[stream];
    if (op.stream == Stream::compute || is_exchange(op.stream) ||
        std::any_of(op.outputs.begin(), op.outputs.end(), may_be_read) ||
        std::any_of(op.inputs.begin(), op.inputs.end(), may_be_written))
      awaited[stream] = counts[stream];
  }
  return awaited;
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
