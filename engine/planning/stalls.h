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
  // `waits` by op, as plan_waits gives them.
  StallFinder(const Program& program, const Waits& waits);

  // Follows each wait of the compute stream, and the end of the step, back over the ops that were late: an op started
  // when the last of what it waited for, the op before it on its stream included, was done. The chain ends at an op
  // that compute itself released, or that waited for nothing. The wait is shared among the streams of the chain by the
  // time that their ops in it took. Allocates nothing.
  const Stalls& find(const std::vector<Span>& spans);

 private:
  struct Chain {
    std::array<double, kStreams> seconds{};  // that ops of each stream ran in it
  };
  bool on_compute(int32_t op) const { return chain_of_.empty() || chain_of_[size_t(op)] < 0; }
  Chain& chain(int32_t op) { return chains_[size_t(chain_of_[size_t(op)])]; }
  int32_t released_by(int32_t op, const std::vector<Span>& spans) const;
  void charge(double seconds, const Chain& chain);

  const Program& program_;
  std::vector<int32_t> causes_;     // of each op: those it waits for, and the one before it on its stream
  std::vector<uint32_t> first_{0};  // by op: of its causes
  // By op: which chain; -1: on the compute stream, where chains end. Empty: all are, and nothing ever waits.
  std::vector<int32_t> chain_of_;
  std::vector<Chain> chains_;  // by op of another stream: that ended with it
  Stalls stalls_;
};

}  // namespace strata
