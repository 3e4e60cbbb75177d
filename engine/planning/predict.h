// Predicts a step on a virtual clock: every op by its cost, the machine's rates and samples of its kernel, streams side
// by side with the waits that the executor will have, ops of one machine sharing its processors. What the runtime
// measures stands beside it.
#pragma once
#include <array>
#include <string>
#include <vector>

#include "engine/planning/memory_plan.h"
#include "engine/planning/rates.h"
#include "engine/planning/stalls.h"

namespace strata {

// Ops of one kind, type and stream.
struct KindTime {
  std::string name;  // "linear f32"
  Stream stream = Stream::compute;
  int64_t calls = 0;
  double seconds = 0;
};

struct Prediction {
  std::vector<Span> spans;  // by op
  Stalls stalls;
  double seconds = 0;                   // of the step, to the end of its last op on any stream
  std::array<double, kStreams> busy{};  // seconds that each stream runs ops
  double wire_bytes = 0;                // that this rank hands to others
  DType dtype = DType::f32;             // in which most FLOPs are computed
};

Prediction predict(const Program& program, const MemoryPlan& plan, const Rates& rates);

// What kinds took in `spans`, predicted or measured, the longest first.
std::vector<KindTime> time_by_kind(const Program& program, const std::vector<Span>& spans);

// The type in which most of the program's FLOPs are computed.
DType compute_dtype(const Program& program);
// FLOP/s that nothing in that type exceeds here; 0: not known.
double peak_of(DType dtype, const Rates& rates);

}  // namespace strata
