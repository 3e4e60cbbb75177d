// What a training run measures of itself: figures of each step for its log line, and the summary at the end, with what
// was planned and predicted beside what was measured.
#pragma once
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "engine/runtime/assembly.h"
#include "engine/runtime/log.h"

namespace strata {

class TrainingReport {
 public:
  // `assembly` must outlive it; `ranks` of the run.
  TrainingReport(const Assembly& assembly, int ranks);
  // Whether a step is to be looked into: a device's ops are timed in the last step alone, it costs events around each.
  bool times(bool last_step) const { return !assembly_.device || last_step; }

  // Takes down a step of a program of the plans and returns its fields of the log, seconds and what follows.
  StepLog::Fields add_step(size_t program, double seconds, bool last_step);
  // Of a stage of a pipeline: takes down for how long it computed in the step that the executor has made.
  void add_busy(const Executor& executor);
  double median_busy() const;
  // Seconds that the busiest stage computes in a step, from which the bubble follows.
  void set_busiest(double predicted, double measured) { busiest_ = std::pair(predicted, measured); }
  double tokens_per_second(double seconds) const;  // of a step
  // Model FLOPs of a step of the program, of what is possible; 0: not known.
  double peak_share(size_t program, double seconds) const;
  DType compute_dtype() const { return compute_dtype_; }

  double median_tokens_per_second() const;  // NaN without a step
  // To stdout. `validation_loss`: NaN where there is none.
  void print(double validation_loss) const;

 private:
  void print_speed() const;
  void print_exchanges() const;
  void print_predictions() const;
  void print_prediction(size_t program) const;
  void print_memory() const;
  void print_tier(Tier tier) const;

  // What steps of one program took, by step.
  struct Steps {
    std::vector<double> seconds;
    std::vector<Stalls> stalls;
  };
  const Assembly& assembly_;
  const PlannedProgram& planned_;  // of the first step
  const int ranks_;
  const DType compute_dtype_;
  double peak_;                                        // FLOP/s
  std::vector<double> flops_;                          // FLOP/s of the model, by step
  std::vector<double> durations_, exchanges_, waits_;  // seconds, by step
  std::vector<Steps> of_program_;
  std::vector<double> busy_;                            // seconds of compute, by step
  std::optional<std::pair<double, double>> busiest_{};  // predicted, measured
};

}  // namespace strata
