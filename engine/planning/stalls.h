// What compute waited for in a step, found from when each op ran: the same for a prediction and for a measurement.
// A wait is charged to what began it, not to the last link of the chain: a copy that waited for a read from NVMe is
// NVMe's fault.
#pragma once
#include <array>
#include <vector>

#include "engine/planning/dependencies.h"

namespace strata {

// When an op runs, in seconds since the step began.
struct Span {
  double start = 0, finish = 0;
};

// A step of several that overlap, as far as it has gone: of each stream the first `over` ops have run, and the step
// ends, for whoever begins the next, with the first `awaited` of them.
struct PartOfStep {
  const std::vector<Span>& spans;
  VectorClock over{}, awaited{};
};

// What a step loses to residency and ranks, in seconds of the compute stream, its end included.
struct Stalls {
  std::array<double, kStreams> waited{};  // for each other stream: read and write are NVMe, to_… copies between arenas
  double restoring = 0;                   // running producers again, decoding
  double exchanging = 0;                  // what exchanges took, hidden behind compute or not
  double storage() const { return waited[int(Stream::read)] + waited[int(Stream::write)]; }
  double copies() const { return waited[int(Stream::to_device)] + waited[int(Stream::to_host)]; }
  double ranks() const {
    double sum = 0;
    for (int s = int(Stream::exchange); s < kStreams; ++s) sum += waited[size_t(s)];
    return sum;
  }
  double host() const { return waited[int(Stream::host)]; }
  double total() const;
};

class StallFinder {
 public:
  // `waits` by op, as plan_waits or plan_overlapping_waits give them.
  StallFinder(const Program& program, const Waits& waits);

  // Follows each wait of the compute stream, and the end of the step, back over the ops that were late: an op started
  // when the last of what it waited for, the op before it on its stream included, was done. The chain ends at an op
  // that compute itself released, or that waited for nothing. The wait is shared among the streams of the chain by the
  // time that their ops in it took. Allocates nothing.
  const Stalls& find(const std::vector<Span>& spans);
  // The same of a step that began while the one before was not over: `before`, on the same clock, is by now. What it
  // left is charged where this step waits for it. Null: nothing came before.
  const Stalls& find(const PartOfStep& step, const std::vector<Span>* before);

 private:
  struct Chain {
    std::array<double, kStreams> seconds{};  // that ops of each stream ran in it
  };
  struct Released {  // by what, and when that was over
    int32_t by;
    double at;
  };
  static constexpr int32_t kNothing = INT32_MAX;  // of causes; negative ones, from -1 on, are ops of the step before
  bool on_compute(int32_t op) const { return chain_of_.empty() || chain_of_[size_t(op)] < 0; }
  const Chain* chain(int32_t cause) const;
  Released released(int32_t op, const std::vector<Span>& spans, const std::vector<Span>* before) const;
  void follow(int32_t op, const Chain* from, double seconds);
  void charge(double seconds, const Chain& chain);

  const Program& program_;
  const VectorClock counts_;        // ops by stream
  std::vector<int32_t> causes_;     // of each op: those it waits for, and the one before it on its stream
  std::vector<uint32_t> first_{0};  // by op: of its causes
  // By op: which chain; -1: on the compute stream, where chains end. Empty: all are, and nothing ever waits.
  std::vector<int32_t> chain_of_;
  std::vector<Chain> chains_, chains_before_;  // by op of another stream: that ended with it
  Stalls stalls_;
};

}  // namespace strata
