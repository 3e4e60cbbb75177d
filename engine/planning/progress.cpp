// See progress.h.
#include "engine/planning/progress.h"

#include <array>

#include "strata/op_kind.h"

namespace strata {
namespace {

class Simulation {
 public:
  Simulation(const Program& program, const Waits& waits, const std::function<bool(Stream)>& queued,
             const std::vector<std::vector<int32_t>>& runs)
      : program_(program), waits_(waits), runs_(runs), run_of_(program.ops.size(), -1) {
    for (int s = 0; s < kStreams; ++s) queued_[size_t(s)] = queued(Stream(s));
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
    }
    for (size_t s = 0; s < ops_.size(); ++s)
      if (done_[s] < ops_[s].size()) return false;
    return true;
  }

  std::string where() const {
    std::string text;
    for (size_t s = 0; s < ops_.size(); ++s) {
      if (done_[s] == ops_[s].size()) continue;
      const int32_t op = ops_[s][done_[s]];
      text += (text.empty() ? "" : "; ") + std::string(name_of(Stream(s))) + " at op " + std::to_string(op) + " (" +
              program_.ops[size_t(op)].kind->name + ")";
      for (const Wait& wait : waits_[size_t(op)])
        if (!over(wait))
          text += ", which waits for op " + std::to_string(ops_[size_t(wait.stream)].at(size_t(wait.count) - 1));
    }
    return text;
  }

 private:
  bool is_queue(Stream stream) const { return queued_[size_t(stream)]; }
  bool over(const Wait& wait) const { return done_[size_t(wait.stream)] >= size_t(wait.count); }

  // The thread that fills the queues.
  bool issue() {
    const size_t before = next_;
    for (; next_ < program_.ops.size(); ++next_) {
      const Op& op = program_.ops[next_];
      const int32_t run = run_of_[next_];
      if (!is_queue(op.stream) || (run >= 0 && runs_[size_t(run)].front() != int32_t(next_))) continue;
      for (const Wait& wait : waits_[next_])
        if (!is_queue(wait.stream) && !over(wait)) return next_ > before;
      issued_[size_t(op.stream)] += run >= 0 ? runs_[size_t(run)].size() : 1;
    }
    return next_ > before;
  }

  bool finish(size_t stream) {
    const size_t before = done_[stream], end = queued_[stream] ? issued_[stream] : ops_[stream].size();
    for (; done_[stream] < end; ++done_[stream])
      for (const Wait& wait : waits_[size_t(ops_[stream][done_[stream]])])
        if (!over(wait)) return done_[stream] > before;
    return done_[stream] > before;
  }

  const Program& program_;
  const Waits& waits_;
  const std::vector<std::vector<int32_t>>& runs_;
  std::vector<int32_t> run_of_;  // by op
  std::array<bool, kStreams> queued_{};
  std::array<std::vector<int32_t>, kStreams> ops_;
  std::array<size_t, kStreams> issued_{}, done_{};
  size_t next_ = 0;  // op that the filling thread is at
};

}  // namespace

void require_progress(const Program& program, const Waits& waits, const std::function<bool(Stream)>& queued,
                      const std::vector<std::vector<int32_t>>& runs) {
  Simulation simulation(program, waits, queued, runs);
  if (!simulation.run())
    throw Error("the step would never end: " + simulation.where() + ". This is a mistake in the plan.",
                ExitCode::failed);
}

}  // namespace strata
