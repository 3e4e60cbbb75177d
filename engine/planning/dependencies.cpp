// Conflicts over byte ranges with vector clocks; see dependencies.h.
#include "engine/planning/dependencies.h"

#include <algorithm>
#include <array>

#include "engine/planning/byte_ranges.h"
#include "strata/device.h"
#include "strata/error.h"

namespace strata {
namespace {

// Last writer and last readers of a range of bytes.
struct Clocks {
  int32_t written = 0;  // ops of the writer's stream that are over then
  uint16_t writer = 0;  // stream
  bool is_read = false;
  VectorClock read{};
};

// A range of bytes by its places.
struct Touched {
  uint32_t begin = 0, end = 0;
  bool write = false;
};

bool all_on_compute(const Program& program) {
  return std::all_of(program.ops.begin(), program.ops.end(), [](const Op& op) { return op.stream == Stream::compute; });
}

int64_t place_of(Tier tier, int64_t offset) {
  constexpr int kTierShift = 56;
  return (int64_t(tier) << kTierShift) + offset;
}

// Where a buffer lies, and a tensor; of one that no op touches: {-1, -1}.
Access range_of(const MemoryPlan& plan, const Buffer& buffer) {
  const int64_t begin = place_of(buffer.tier, plan[buffer.tier].persistent_bytes + buffer.offset);
  return {begin, begin + buffer.bytes};
}
Access range_of(const Program& program, const MemoryPlan& plan, TensorId id) {
  const Tensor& tensor = program[id];
  int64_t begin = 0;
  if (tensor.persistent) {
    const auto found = plan.persistent_offset.find(id.value);
    if (found == plan.persistent_offset.end()) return {-1, -1};
    begin = place_of(tensor.home, found->second);
  } else {
    const int32_t buffer = plan.buffer_of[size_t(id.value)];
    if (buffer < 0) return {-1, -1};
    begin = range_of(plan, plan.buffers[size_t(buffer)]).begin;
  }
  begin += tensor.part_offset;
  return {begin, begin + tensor.bytes()};
}

// A tensor on the disk.
bool is_on_disk(const Program& program, const MemoryPlan& plan, TensorId id) {
  if (program[id].persistent) return program[id].home == Tier::nvme;
  const int32_t buffer = plan.buffer_of[size_t(id.value)];
  return buffer >= 0 && plan.buffers[size_t(buffer)].tier == Tier::nvme;
}
// The disk moves whole blocks: a read overwrites what is behind the tensor in its last one, where a part of another
// tensor may lie that does not reach back to the block's beginning.
Access of_blocks(Access range) {
  range.end = range.begin + (range.end - range.begin + kStorageAlignment - 1) / kStorageAlignment * kStorageAlignment;
  return range;
}

// The ranges of ops as somebody gives them.
class GivenRanges {
 public:
  GivenRanges(const Program& program, const AccessesOf& accesses) : accesses_(accesses) {
    for (int32_t i = 0; i < int32_t(program.ops.size()); ++i)
      for (const Access& access : accesses(i)) places_.add(access.begin), places_.add(access.end);
    places_.sort();
  }
  size_t places() const { return places_.size(); }
  void of(int32_t op, std::vector<Touched>& touched) const {
    for (const Access& access : accesses_(op))
      touched.push_back({places_[access.begin], places_[access.end], access.write});
  }

 private:
  const AccessesOf& accesses_;
  Places places_;
};

// Those of a plan, looked up once for each tensor. What they are is what accesses_of says.
class PlannedRanges {
 public:
  PlannedRanges(const Program& program, const MemoryPlan& plan) : program_(program), plan_(plan) {
    find_moves_of_blocks();
    for (int pass = 0; pass < 2; ++pass) {  // the places, then which of them are a tensor's
      for (int32_t t = 0; t < int32_t(program.tensors.size()); ++t)
        if (const auto range = range_of(program, plan, {t}); range.end >= 0) {
          take(pass, by_tensor_, t, range);
          if (!in_blocks_.empty() && is_in_blocks_[size_t(t)]) take(pass, by_blocks_, t, of_blocks(range));
        }
      for (size_t i = 0; i < program.ops.size(); ++i)
        if (const int32_t w = plan.workspace_of[i]; w >= 0)
          take(pass, by_workspace_, w, range_of(plan, plan.buffers[size_t(w)]));
      if (pass > 0) break;
      places_.sort();
      by_tensor_.resize(program.tensors.size());
      if (!in_blocks_.empty()) by_blocks_.resize(program.tensors.size());
      by_workspace_.resize(plan.buffers.size());
    }
  }
  size_t places() const { return places_.size(); }
  void of(int32_t index, std::vector<Touched>& touched) const {
    const Op& op = program_.ops[size_t(index)];
    const auto add = [&](const Numbers& range, bool write) { touched.push_back({range.begin, range.end, write}); };
    const auto& ranges = !in_blocks_.empty() && in_blocks_[size_t(index)] ? by_blocks_ : by_tensor_;
    for (TensorId id : op.inputs)
      if (id) add(ranges[size_t(id.value)], false);
    for (TensorId id : op.outputs) add(ranges[size_t(id.value)], true);
    if (const int32_t w = plan_.workspace_of[size_t(index)]; w >= 0) add(by_workspace_[size_t(w)], true);
    if (op.purpose == Purpose::again) add(ranges[size_t(program_.again_if.value)], false);
  }

 private:
  struct Numbers {
    uint32_t begin = 0, end = 0;
  };
  void take(int pass, std::vector<Numbers>& list, int32_t number, const Access& range) {
    if (pass == 0)
      places_.add(range.begin), places_.add(range.end);
    else
      list[size_t(number)] = {places_[range.begin], places_[range.end]};
  }
  // Which ops the disk moves blocks for, and the tensors of those.
  void find_moves_of_blocks() {
    std::vector<bool> on_disk(program_.tensors.size());
    bool any = false;
    for (size_t t = 0; t < on_disk.size(); ++t) any |= on_disk[t] = is_on_disk(program_, plan_, {int32_t(t)});
    if (!any) return;
    in_blocks_.resize(program_.ops.size()), is_in_blocks_.resize(program_.tensors.size());
    const auto lies_there = [&](TensorId id) { return id && on_disk[size_t(id.value)]; };
    for (size_t i = 0; i < program_.ops.size(); ++i) {
      const Op& op = program_.ops[i];
      in_blocks_[i] = std::any_of(op.inputs.begin(), op.inputs.end(), lies_there) ||
                      std::any_of(op.outputs.begin(), op.outputs.end(), lies_there);
      if (!in_blocks_[i]) continue;
      for (const auto* list : {&op.inputs, &op.outputs})
        for (TensorId id : *list)
          if (id) is_in_blocks_[size_t(id.value)] = true;
      if (op.purpose == Purpose::again) is_in_blocks_[size_t(program_.again_if.value)] = true;
    }
  }

  const Program& program_;
  const MemoryPlan& plan_;
  Places places_;
  std::vector<Numbers> by_tensor_, by_blocks_, by_workspace_;
  std::vector<bool> in_blocks_, is_in_blocks_;  // by op, and by tensor; without a disk none
};

// Goes over the ops of one step after the other.
template <class RangesOf>
class Conflicts {
 public:
  Conflicts(const Program& program, const RangesOf& ranges, int steps)
      : program_(program), ranges_(ranges), known_(ranges.places()) {
    const VectorClock counts = ops_by_stream(program);
    for (size_t s = 0; s < counts.size(); ++s) after_[s].reserve(size_t(counts[s]) * size_t(steps));
  }

  // Calls found(waits of the op), with counts from the first step on, for one op after the other.
  template <class Found>
  void step(Found&& found) {
    for (int32_t i = 0; i < int32_t(program_.ops.size()); ++i) {
      find_waits(i);
      found(waits_);
    }
  }

  // Whatever comes begins after so many ops of each stream.
  void all_await(const VectorClock& counts) {
    VectorClock known = counts;
    for (size_t s = 0; s < counts.size(); ++s)
      if (counts[s] > 0) raise(known, after_[s][size_t(counts[s]) - 1]);
    for (VectorClock& clock : seen_) raise(clock, known);
  }

 private:
  void find_waits(int32_t op) {
    const int stream = int(program_.ops[size_t(op)].stream);
    VectorClock needed{};
    touched_.clear();
    ranges_.of(op, touched_);
    for (const Touched& range : touched_)
      known_.over(range.begin, range.end, [&](const Clocks& piece) {
        needed[piece.writer] = std::max(needed[piece.writer], piece.written);
        if (range.write && piece.is_read) raise(needed, piece.read);
      });
    VectorClock& clock = seen_[size_t(stream)];
    waits_.clear();
    for (int s = 0; s < kStreams; ++s)
      if (s != stream && needed[s] > clock[s]) {
        waits_.push_back({Stream(s), needed[s]});
        raise(clock, after_[s][needed[s] - 1]);
      }
    const int32_t mine = clock[size_t(stream)] = ++issued_[size_t(stream)];
    after_[stream].push_back(clock);
    for (const Touched& range : touched_)
      if (range.write) known_.set(range.begin, range.end, {.written = mine, .writer = uint16_t(stream)});
    for (const Touched& range : touched_)
      if (!range.write)
        known_.over(range.begin, range.end, [&](Clocks& piece) {
          piece.is_read = true;
          piece.read[size_t(stream)] = mine;
        });
  }

  const Program& program_;
  const RangesOf& ranges_;
  RangeValues<Clocks> known_;
  std::array<VectorClock, kStreams> seen_{};  // what each stream knows to be finished
  VectorClock issued_{};
  std::array<std::vector<VectorClock>, kStreams> after_;  // what is known once op n of a stream has finished
  std::vector<Touched> touched_;                          // by the op that is looked at
  std::vector<Wait> waits_;                               // of it
};

template <class RangesOf>
Waits waits_of(const Program& program, const RangesOf& ranges) {
  Waits waits;
  Conflicts(program, ranges, 1).step([&](const std::vector<Wait>& own) { waits.push_back(own); });
  return waits;
}

// Two steps are enough: what an op of the step before the last shares with one of this step, the same op of the last
// step shares too, and each op of a stream comes after itself in the step before.
template <class RangesOf>
Waits overlapping_waits_of(const Program& program, const VectorClock& awaited, const RangesOf& ranges) {
  Waits waits;
  const VectorClock counts = ops_by_stream(program);
  Conflicts conflicts(program, ranges, 2);
  conflicts.step([](const std::vector<Wait>&) {});
  conflicts.all_await(awaited);
  conflicts.step([&](std::vector<Wait>& own) {
    for (Wait& wait : own) wait.count -= counts[size_t(wait.stream)];
    waits.push_back(own);
  });
  return waits;
}

}  // namespace

Waits plan_waits(const Program& program, const AccessesOf& accesses) {
  return all_on_compute(program) ? Waits() : waits_of(program, GivenRanges(program, accesses));
}

Waits plan_waits(const Program& program, const MemoryPlan& plan) {
  if (all_on_compute(program)) return {};
  return waits_of(program, PlannedRanges(program, plan));
}

StepWaits plan_overlapping_waits(const Program& program, const MemoryPlan& plan) {
  const VectorClock awaited = awaited_by_host(program);
  if (all_on_compute(program)) return {.waits = {}, .awaited = awaited};
  return {.waits = overlapping_waits_of(program, awaited, PlannedRanges(program, plan)), .awaited = awaited};
}

VectorClock ops_by_stream(const Program& program) {
  VectorClock counts{};
  for (const Op& op : program.ops) ++counts[size_t(op.stream)];
  return counts;
}

bool steps_overlap(const Program& program) {
  return std::any_of(program.ops.begin(), program.ops.end(), [&](const Op& op) {
    return program.one_memory ? op.stream != Stream::compute
                              : op.stream == Stream::host || op.stream == Stream::read || op.stream == Stream::write;
  });
}

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
  const auto may_be_written = [&](TensorId id, bool by_device) {
    if (!id) return false;
    const TensorId whole = program.whole(id);
    return (program[whole].role == Role::data && !program[whole].copy_of) ||
           (program[whole].role == Role::scalar && (by_device || !held[size_t(whole.value)]));
  };
  VectorClock counts{}, awaited{};
  for (const Op& op : program.ops) {
    const size_t stream = size_t(op.stream);
    const bool by_device = !program.one_memory && on_device(op.stream);  // which has one place for such numbers
    ++counts[stream];
    if (op.stream == Stream::compute || is_exchange(op.stream) ||
        std::any_of(op.outputs.begin(), op.outputs.end(), may_be_read) ||
        std::any_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) { return may_be_written(id, by_device); }))
      awaited[stream] = counts[stream];
  }
  return awaited;
}

std::vector<Access> accesses_of(const Program& program, const MemoryPlan& plan, int32_t index) {
  const Op& op = program.ops[index];
  const auto on_disk = [&](TensorId id) { return id && is_on_disk(program, plan, id); };
  const bool in_blocks = std::any_of(op.inputs.begin(), op.inputs.end(), on_disk) ||
                         std::any_of(op.outputs.begin(), op.outputs.end(), on_disk);
  std::vector<Access> list;
  const auto add = [&](TensorId id, bool write) {
    Access range = range_of(program, plan, id);
    STRATA_CHECK(range.end >= 0);
    if (in_blocks) range = of_blocks(range);
    range.write = write;
    list.push_back(range);
  };
  for (TensorId id : op.inputs)
    if (id) add(id, false);
  for (TensorId id : op.outputs) add(id, true);
  if (op.purpose == Purpose::again) add(program.again_if, false);
  if (const int32_t w = plan.workspace_of[index]; w >= 0) {
    list.push_back(range_of(plan, plan.buffers[w]));
    list.back().write = true;
  }
  return list;
}

}  // namespace strata
