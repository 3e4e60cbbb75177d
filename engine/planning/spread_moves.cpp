// As late as possible for what comes, as early as possible for what goes; see spread_moves.h.
#include "engine/planning/spread_moves.h"

#include <algorithm>
#include <numeric>

namespace strata {
namespace {

constexpr double kMargin = 1.25;  // predictions are not exact: start this much earlier

bool is_move(const Op& op) {
  return op.stream == Stream::to_device || op.stream == Stream::to_host || op.stream == Stream::read ||
         op.stream == Stream::write || (is_exchange(op.stream) && op.purpose == Purpose::restore);
}
bool is_copy(const Op& op) { return is_move(op) && !is_exchange(op.stream); }

class Spreader {
 public:
  Spreader(const Program& program, const MemoryPlan& plan, const Rates& rates,
           const std::array<int64_t, kTiers>& limits)
      : program_(program), limits_(limits), count_(int32_t(program.ops.size())), place_(program.ops.size()) {
    std::iota(place_.begin(), place_.end(), 0);
    start_.resize(size_t(count_) + 1);
    seconds_.resize(size_t(count_));
    for (int32_t i = 0; i < count_; ++i) {
      seconds_[i] = seconds_of(OpView(program, program.ops[i]), rates);
      start_[i + 1] = start_[i] + (program.ops[i].stream == Stream::compute ? seconds_[i] : 0);
    }
    for (int t = 0; t < kTiers; ++t) {
      live_[t] = live_bytes(program, plan, Tier(t));
      for (int64_t& bytes : live_[t]) bytes += plan.tiers[t].persistent_bytes;
    }
    const auto none = std::vector<int32_t>(program.tensors.size(), -1);
    written_ = none, last_use_ = none;
  }

  bool limited() const { return limited_; }

  // The new order of ops.
  std::vector<int32_t> run() {
    find_neighbours();
    for (int32_t i = 0; i < count_; ++i)
      if (is_copy(program_.ops[i]) && program_.ops[i].purpose == Purpose::rest) delay(i);
    for (int32_t i = count_; i-- > 0;)
      if (is_move(program_.ops[i]) && program_.ops[i].purpose == Purpose::restore) advance(i);
    std::vector<int32_t> order(size_t(count_), 0);
    std::iota(order.begin(), order.end(), 0);
    // At one place: what leaves, then what comes, then the op that is there.
    const auto rank = [&](int32_t i) {
      const Op& op = program_.ops[i];
      return !is_move(op) ? 2 : op.purpose == Purpose::rest ? 0 : 1;
    };
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return std::pair(place_[a], rank(a)) < std::pair(place_[b], rank(b));
    });
    return order;
  }

 private:
  // For each move: the op that makes its source, and the first one that reads or replaces what it brings.
  void find_neighbours() {
    source_.assign(size_t(count_), -1);
    reader_.assign(size_t(count_), count_);
    std::vector<int32_t> moved(program_.tensors.size(), -1);  // the move that wrote the tensor last
    for (int32_t i = 0; i < count_; ++i) {
      const Op& op = program_.ops[i];
      for (TensorId id : op.inputs)
        if (id) {
          last_use_[program_.whole(id).value] = i;
          if (const int32_t by = moved[program_.whole(id).value]; by >= 0) reader_[by] = std::min(reader_[by], i);
        }
      if (is_move(op))
        for (TensorId id : op.inputs) source_[i] = std::max(source_[i], written_[program_.whole(id).value]);
      for (TensorId out : op.outputs) {
        const TensorId id = program_.whole(out);
        if (const int32_t by = moved[id.value]; by >= 0) reader_[by] = std::min(reader_[by], i);
        last_use_[id.value] = i;
        written_[id.value] = i;
        moved[id.value] = is_move(op) ? i : -1;
      }
    }
  }

  bool room(Tier tier, int32_t at, int64_t bytes) {
    const int64_t limit = limits_[int(tier)];
    const bool fits = limit <= 0 || live_[int(tier)][at] + bytes <= limit;
    limited_ |= !fits;
    return fits;
  }

  // What leaves: its source stays until the transfer is predicted to be over.
  void delay(int32_t i) {
    const Op& op = program_.ops[i];
    const Tensor& from = program_[op.inputs[0]];
    double& free = busy_until_[int(op.stream)];
    free = std::max(free, start_[i]) + seconds_[i];
    const int32_t end = std::min(reader_[i], count_);
    if (from.persistent || last_use_[op.inputs[0].value] != i) return;
    const int64_t bytes = from.bytes();
    int32_t place = i;
    while (place + 1 < end && start_[place + 1] < free && room(from.home, place + 1, bytes))
      live_[int(from.home)][++place] += bytes;
    place_[i] = place;
  }

  // What comes: early enough to be there in time, where memory allows.
  void advance(int32_t i) {
    const Op& op = program_.ops[i];
    const Tier tier = program_[op.outputs[0]].home;
    int64_t bytes = 0;
    for (TensorId id : op.outputs) bytes += program_[id].bytes();
    double& next = due_[int(op.stream)];
    const double in_time = std::min(reader_[i] < count_ ? start_[reader_[i]] : start_[count_], next);
    next = in_time - seconds_[i] * kMargin;
    const int32_t after = source_[i] < 0 ? 0 : place_[source_[i]] + 1;
    int32_t place = i;
    while (place > after && start_[place] > next && room(tier, place - 1, bytes)) live_[int(tier)][--place] += bytes;
    place_[i] = place;
  }

  const Program& program_;
  const std::array<int64_t, kTiers>& limits_;
  int32_t count_;
  std::vector<int32_t> place_;                     // by op: the op of the old order before which it goes
  std::vector<double> start_, seconds_;            // by op, on the compute stream, were nothing ever late
  std::array<std::vector<int64_t>, kTiers> live_;  // bytes alive by op
  std::vector<int32_t> written_, last_use_;        // by tensor
  std::vector<int32_t> source_, reader_;           // by op
  bool limited_ = false;
  std::array<double, kStreams> busy_until_{}, due_ = filled(1e30);

  static std::array<double, kStreams> filled(double value) {
    std::array<double, kStreams> all;
    all.fill(value);
    return all;
  }
};

}  // namespace

bool spread_moves(Program& program, const MemoryPlan& plan, const Rates& rates,
                  const std::array<int64_t, kTiers>& limits) {
  if (std::none_of(program.ops.begin(), program.ops.end(), is_move)) return false;
  Spreader spreader(program, plan, rates, limits);
  const std::vector<int32_t> order = spreader.run();
  std::vector<Op> ops;
  ops.reserve(order.size());
  for (int32_t i : order) ops.push_back(std::move(program.ops[i]));
  program.ops = std::move(ops);
  return spreader.limited();
}

}  // namespace strata
