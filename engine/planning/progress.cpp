// See progress.h.
#include "engine/planning/progress.h"

#include <array>

#include "strata/op_kind.h"

namespace strata {
namespace {

class Simulation {
 public:
  Simulation(const Program& program, const Waits& waits, const VectorClock& awaited,
             const std::function<bool(Stream)>& queued, const std::vector<std::vector<int32_t>>& runs)
      : program_(program), waits_(waits), awaited_(awaited), runs_(runs), run_of_(program.ops.size(), -1) {
    for (int s = 0; s < kStreams; ++s) queued_[size_t(s)] = queued(Stream(s));
    for (size_t i = 0; i < program.ops.size(); ++i)
      for (const Wait& wait : waits[i])
        if (wait.count <= 0) steps_ = 2;
    for (size_t i = 0; i < program.ops.size(); ++i) ops_[size_t(program.ops[i].stream)].push_back(int32_t(i));
    for (size_t r = 0; r < runs.size(); ++r)
      for (int32_t i : runs[r]) run_of_[size_t(i)] = int32_t(r);
  }

  // Each stream as far as it comes, until none comes further.
  bool run() {
    bool moved = true;
    while (moved) {
      moved = issue();
      for (int s = 0; s < kStreams; ++s) moved |= finish(size_t(s));
      moved |= begin_step();
    }
    for (size_t s = 0; s < ops_.size(); ++s)
      if (done_[s] < steps_ * ops_[s].size()) return false;
    return true;
  }

  std::string where() const {
    std::string text;
    for (size_t s = 0; s < ops_.size(); ++s) {
      if (done_[s] >= begun_ * ops_[s].size()) continue;
      const int32_t op = ops_[s][done_[s] % ops_[s].size()];
      text += (text.empty() ? "" : "; ") + std::string(name_of(Stream(s))) + " at op " + std::to_string(op) + " (" +
              program_.ops[size_t(op)].kind->name + ")" + (done_[s] < ops_[s].size() ? "" : " of the next step");
      for (const Wait& wait : waits_[size_t(op)])
        if (!over(wait, done_[s] / ops_[s].size())) text += ", which waits for " + awaited_text(wait);
    }
    return text;
  }

 private:
  bool is_queue(Stream stream) const { return queued_[size_t(stream)]; }
  // For an op of step `step`.
  bool over(const Wait& wait, size_t step) const {
    const size_t s = size_t(wait.stream);
    return int64_t(done_[s]) >= int64_t(step * ops_[s].size()) + wait.count;
  }
  std::string awaited_text(const Wait& wait) const {
    const auto& ops = ops_[size_t(wait.stream)];
    const int64_t place = (wait.count > 0 ? 0 : int64_t(ops.size())) + wait.count - 1;
    return place < int64_t(ops.size()) ? "op " + std::to_string(ops[size_t(place)])
                                       : "more ops than " + std::string(name_of(wait.stream)) + " has";
  }

  // Whoever begins the steps.
  bool begin_step() {
    if (begun_ == steps_ || next_ < program_.ops.size()) return false;
    for (size_t s = 0; s < ops_.size(); ++s)
      if (done_[s] < (begun_ - 1) * ops_[s].size() + size_t(awaited_[s])) return false;
    ++begun_;
    next_ = 0;
    return true;
  }

  // The thread that fills the queues.
  bool issue() {
    const size_t before = next_;
    for (; next_ < program_.ops.size(); ++next_) {
      const Op& op = program_.ops[next_];
      const int32_t run = run_of_[next_];
      if (!is_queue(op.stream) || (run >= 0 && runs_[size_t(run)].front() != int32_t(next_))) continue;
      for (const Wait& wait : waits_[next_])
        if (!is_queue(wait.stream) && !over(wait, begun_ - 1)) return next_ > before;
      issued_[size_t(op.stream)] += run >= 0 ? runs_[size_t(run)].size() : 1;
    }
    return next_ > before;
  }

  bool finish(size_t stream) {
    const auto& ops = ops_[stream];
    const size_t before = done_[stream], end = queued_[stream] ? issued_[stream] : begun_ * ops.size();
    for (; done_[stream] < end; ++done_[stream])
      for (const Wait& wait : waits_[size_t(ops[done_[stream] % ops.size()])])
        if (!over(wait, done_[stream] / ops.size())) return done_[stream] > before;
    return done_[stream] > before;
  }

  const Program& program_;
  const Waits& waits_;
  const VectorClock& awaited_;
  const std::vector<std::vector<int32_t>>& runs_;
  std::vector<int32_t> run_of_;  // by op
  std::array<bool, kStreams> queued_{};
  std::array<std::vector<int32_t>, kStreams> ops_;
  std::array<size_t, kStreams> issued_{}, done_{};  // of all steps
  size_t steps_ = 1, begun_ = 1;
  size_t next_ = 0;  // op that the filling thread is at
};

}  // namespace

void require_progress(const Program& program, const Waits& waits, const VectorClock& awaited,
                      const std::function<bool(Stream)>& queued, const std::vector<std::vector<int32_t>>& runs) {
  Simulation simulation(program, waits, awaited, queued, runs);
  if (!simulation.run())
    throw Error("the step would never end: " + simulation.where() + ". This is a mistake in the plan.",
                ExitCode::failed);
}

}  // namespace strata
