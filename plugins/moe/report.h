// What the log says of experts: losses of routers, dropped choices, and the load, of the busiest expert or of each.
#pragma once
#include <cstdint>
#include <vector>

#include "strata/plugin.h"

namespace strata::moe {

void register_report_kinds();

// The op that was emitted last looks at what the op at `maker` made in the forward pass, and is of that pass, too.
// Later it may have been given up, and to read it would be to make it again out of turn, which of blocks that are
// inverted gives other bits.
void look_at_once(Program& program, size_t maker);

// Emits in stage `gradients` what a step tells, and hands it to the log at its end. On every stage of a pipeline, also
// those without a layer of experts: what all tell is summed.
class Report {
 public:
  // `layers`: blocks that have experts, of the whole model; `microbatches`: of a rank and step; `each`: the load of
  // each expert of each layer, too.
  Report(std::vector<int64_t> layers, int64_t experts, int64_t microbatches, bool each)
      : layers_(std::move(layers)), experts_(experts), microbatches_(microbatches), each_(each) {}
  Report() = default;
  void emit(GradientStage& stage) const;
  void log(StepContext& context) const;

  static bool is_loss(const Op& op);

 private:
  std::string name_of(int64_t layer, int64_t expert) const;

  std::vector<int64_t> layers_{};
  int64_t experts_ = 0, microbatches_ = 1;
  bool each_ = false;
};

}  // namespace strata::moe
