// Predicts a step on a virtual clock: every op by its cost rule and the machine's rates, streams side by side, waits as
// the executor will have them. What the runtime measures stands beside it.
#pragma once
#include <array>
#include <vector>

#include "engine/planning/memory_plan.h"
#include "engine/planning/rates.h"

namespace strata {

// What a step loses to residency, in seconds of the compute stream.
struct Stalls {
  std::array<double, kStreams> waited{};  // for each other stream: read and write are NVMe, to_… copies between arenas
  double restoring = 0;                   // running producers again, decoding
  double exchanging = 0;                  // what exchanges took, hidden behind compute or not; measured only
  double storage() const { return waited[int(Stream::read)] + waited[int(Stream::write)]; }
  double copies() const { return waited[int(Stream::to_device)] + waited[int(Stream::to_host)]; }
  double ranks() const { return waited[int(Stream::exchange)]; }
  double total() const;
};

// When an op runs, in seconds since the step began.
struct Span {
  double start = 0, finish = 0;
};

struct Prediction {
  std::vector<Span> spans;  // by op
  Stalls stalls;
  double seconds = 0;  // of the step
};

Prediction predict(const Program& program, const MemoryPlan& plan, const Rates& rates);

}  // namespace strata
