// Events of streams that share processors; see predict.h.
#include "engine/planning/predict.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>
#include <unordered_map>

#include "engine/planning/dependencies.h"
#include "engine/program/signature.h"

namespace strata {
namespace {

DType most(const std::map<DType, double>& flops) {
  const auto found =
      std::max_element(flops.begin(), flops.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return found == flops.end() || found->second == 0 ? DType::f32 : found->first;
}

// Runs streams side by side. Each works on one op at a time, which begins when what it waits for is done; ops that
// together ask for more processors than there are get their share.
class Clock {
 public:
  Clock(const Program& program, const Waits& waits, const Rates& rates)
      : program_(program), waits_(waits), rates_(rates), spans_(program.ops.size()) {
    for (size_t i = 0; i < program.ops.size(); ++i) streams_[int(program.ops[i].stream)].ops.push_back(int32_t(i));
  }

  std::vector<Span> run() {
    for (begin(); advance(); begin()) {
    }
    return std::move(spans_);
  }

  DType dtype() const {
    std::map<DType, double> flops;
    for (const Alike& alike : alike_) flops[alike.dtype] += alike.flops * double(alike.count);
    return most(flops);
  }

 private:
  struct Lane {
    std::vector<int32_t> ops;
    size_t done = 0;
    bool running = false;
    double left = 0, processors = 0, speed = 1;  // of the op that runs: seconds alone, what it takes, its share
  };

  double processors_of(const Op& op) const {
    switch (op.stream) {
      case Stream::compute:
        return rates_.compute_threads;
      case Stream::host:
        return rates_.host_threads;
      case Stream::read:
      case Stream::write:
        return 0;  // the disk's
      default:
        return rates_.compute_threads > 0 ? 1 : 0;
    }
  }

  // Ops that take as long: copies for other microbatches, and of other blocks.
  struct Alike {
    double seconds = 0, flops = 0;  // of one
    DType dtype = DType::f32;
    int64_t count = 0;
  };

  // Of the op by itself.
  double seconds_alone(const Op& op) {
    const OpView view(program_, op);
    const auto [known, is_new] = number_.try_emplace(signature(view), alike_.size());
    if (is_new) alike_.push_back({seconds_of(view, rates_), cost_of(view).flops, dtype_of(view)});
    Alike& alike = alike_[known->second];
    ++alike.count;
    return alike.seconds;
  }

  bool ready(size_t op) const {
    return std::all_of(waits_[op].begin(), waits_[op].end(),
                       [&](const Wait& wait) { return streams_[int(wait.stream)].done >= size_t(wait.count); });
  }

  void begin() {
    double wanted = 0;
    for (Lane& lane : streams_) {
      if (!lane.running && lane.done < lane.ops.size() && ready(lane.ops[lane.done])) {
        const size_t op = size_t(lane.ops[lane.done]);
        lane.running = true;
        lane.left = seconds_alone(program_.ops[op]);
        lane.processors = processors_of(program_.ops[op]);
        spans_[op].start = now_;
      }
      if (lane.running) wanted += lane.processors;
    }
    for (Lane& lane : streams_)
      lane.speed = lane.processors > 0 && rates_.processors > 0 ? std::min(1.0, rates_.processors / wanted) : 1;
  }

  // To the next end of an op; false: all are done.
  bool advance() {
    double step = std::numeric_limits<double>::infinity();
    for (const Lane& lane : streams_)
      if (lane.running) step = std::min(step, lane.left / lane.speed);
    if (step == std::numeric_limits<double>::infinity()) return false;
    now_ += step;
    for (Lane& lane : streams_) {
      if (!lane.running) continue;
      const bool over = lane.left / lane.speed <= step;
      lane.left -= step * lane.speed;
      if (!over) continue;
      spans_[size_t(lane.ops[lane.done++])].finish = now_;
      lane.running = false;
    }
    return true;
  }

  const Program& program_;
  const Waits& waits_;
  const Rates& rates_;
  std::vector<Span> spans_;
  std::unordered_map<uint64_t, size_t> number_;  // by signature: in alike_
  std::vector<Alike> alike_;
  std::array<Lane, kStreams> streams_;
  double now_ = 0;
};

}  // namespace

Prediction predict(const Program& program, const MemoryPlan& plan, const Rates& rates) {
  const Waits waits = plan_waits(program, plan);
  Prediction result;
  Clock clock(program, waits, rates);
  result.spans = clock.run();
  result.dtype = clock.dtype();
  result.stalls = StallFinder(program, waits).find(result.spans);
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Span& span = result.spans[i];
    result.busy[int(program.ops[i].stream)] += span.finish - span.start;
    result.seconds = std::max(result.seconds, span.finish);
    result.wire_bytes += wire_bytes(OpView(program, program.ops[i]), rates);
  }
  return result;
}

std::vector<KindTime> time_by_kind(const Program& program, const std::vector<Span>& spans) {
  std::map<std::tuple<const OpKind*, DType, Stream>, KindTime> times;
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const OpView view(program, program.ops[i]);
    KindTime& time = times[{view.op().kind, dtype_of(view), view.op().stream}];
    ++time.calls;
    time.seconds += spans[i].finish - spans[i].start;
  }
  std::map<std::pair<std::string, Stream>, KindTime> kinds;
  for (auto& [key, time] : times) {
    const auto& [kind, dtype, stream] = key;
    time.name = kind->name + " " + std::string(name_of(dtype)), time.stream = stream;
    kinds[{time.name, stream}] = time;
  }
  std::vector<KindTime> sorted;
  for (auto& [key, kind] : kinds) sorted.push_back(std::move(kind));
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const KindTime& a, const KindTime& b) { return a.seconds > b.seconds; });
  return sorted;
}

DType compute_dtype(const Program& program) {
  std::map<DType, double> flops;
  for (const auto& [op, count] : distinct_ops(program)) {
    const OpView view(program, *op);
    flops[dtype_of(view)] += cost_of(view).flops * double(count);
  }
  return most(flops);
}

double peak_of(DType dtype, const Rates& rates) { return size_of(dtype) == 2 ? rates.half_peak : rates.peak; }

}  // namespace strata
