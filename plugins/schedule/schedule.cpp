// Learning-rate schedules: sets the factor that optimizers multiply their learning rate by, before each step.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "strata/plugin.h"

namespace {

class Schedule final : public strata::Plugin {
 public:
  void options(strata::Options& o) override {
    o.add("kind", kind_, "after the warm-up").choices({"cosine", "linear", "constant", "inverse_square_root"});
    o.add("warmup", warmup_, "steps over which the factor rises linearly to 1").non_negative().unit("steps");
    o.add("final", final_, "factor at the last step (cosine, linear)").range(0, 1);
    o.add("steps", steps_, "length of the schedule; 0: run.steps").non_negative().unit("steps");
  }

  void step_start(strata::StepContext& context) override {
    context.set_scalar(strata::kLearningRateFactor, factor(context.step(), steps_ > 0 ? steps_ : context.steps()));
    context.log("learning_rate_factor", context.scalar(strata::kLearningRateFactor));
  }

 private:
  // step counts from 1. Warm-up: step / warmup. Then with t from 0 at its end to 1 at the last step:
  // cosine final + (1 - final)(1 + cos πt)/2 (arXiv 1608.03983), linear 1 - (1 - final)t; inverse square root √(warmup/step).
  double factor(int64_t step, int64_t steps) const {
    if (step < warmup_) return double(step) / double(warmup_);
    const double t = std::clamp(double(step - warmup_) / double(std::max<int64_t>(steps - warmup_, 1)), 0.0, 1.0);
    if (kind_ == "cosine") return final_ + (1 - final_) * (1 + std::cos(std::numbers::pi * t)) / 2;
    if (kind_ == "linear") return 1 - (1 - final_) * t;
    if (kind_ == "inverse_square_root") return std::sqrt(double(std::max<int64_t>(warmup_, 1)) / double(step));
    return 1;
  }

  std::string kind_ = "cosine";
  int64_t warmup_ = 0, steps_ = 0;
  double final_ = 0.1;
};

}  // namespace

STRATA_PLUGIN(Schedule, "schedule", "1.0.0", "learning-rate warm-up and decay")
