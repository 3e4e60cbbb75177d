// The learning rate's course over a run, as a factor of its peak. Not the plugin.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>

namespace strata::schedule {

struct Course {
  std::string kind = "cosine";  // cosine, linear, constant, inverse_square_root
  int64_t warmup = 0;           // steps
  double final = 0.1;           // factor at the last step (cosine, linear)
};

// The factor of `step` (from 1) in a run of `steps`. Warm-up: step/warmup, so that step `warmup` is the first at the
// peak. Then, with t from 0 at its end to 1 at the last step and beyond:
// cosine: final + (1 − final)(1 + cos πt)/2 (arXiv 1608.03983); linear: 1 − (1 − final)t; constant: 1;
// inverse_square_root: √(warmup/step) (arXiv 1706.03762), 1/√step without warm-up.
inline double factor(const Course& course, int64_t step, int64_t steps) {
  if (step < course.warmup) return double(step) / double(course.warmup);
  const int64_t after = std::max<int64_t>(steps - course.warmup, 1);
  const double t = std::clamp(double(step - course.warmup) / double(after), 0.0, 1.0);
  if (course.kind == "cosine") return course.final + (1 - course.final) * (1 + std::cos(std::numbers::pi * t)) / 2;
  if (course.kind == "linear") return 1 - (1 - course.final) * t;
  if (course.kind == "inverse_square_root")
    return std::sqrt(double(std::max<int64_t>(course.warmup, 1)) / double(step));
  return 1;
}

}  // namespace strata::schedule
