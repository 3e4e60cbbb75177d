// One pass in the order of the program; see stalls.h.
#include "engine/planning/stalls.h"

#include <algorithm>
#include <numeric>

namespace strata {

double Stalls::total() const { return std::accumulate(waited.begin(), waited.end(), restoring); }

StallFinder::StallFinder(const Program& program, const Waits& waits) : program_(program) {
  const auto is_compute = [](const Op& op) { return op.stream == Stream::compute; };
  if (std::all_of(program.ops.begin(), program.ops.end(), is_compute)) return;  // nothing to wait for
  std::array<std::vector<int32_t>, kStreams> ops;                               // by stream
  int32_t chains = 0;
  for (auto* by_op : {&causes_, &chain_of_}) by_op->reserve(program.ops.size());
  first_.reserve(program.ops.size() + 1);
  for (size_t i = 0; i < program.ops.size(); ++i) {
    auto& own = ops[size_t(program.ops[i].stream)];
    if (!own.empty()) causes_.push_back(own.back());
    for (const Wait& wait : waits[i])
      if (wait.count > 0) causes_.push_back(ops[size_t(wait.stream)][size_t(wait.count) - 1]);
    first_.push_back(uint32_t(causes_.size()));
    chain_of_.push_back(program.ops[i].stream == Stream::compute ? -1 : chains++);
    own.push_back(int32_t(i));
  }
  chains_.resize(size_t(chains));
}

// What the op waited for and was done last; -1: nothing.
int32_t StallFinder::released_by(int32_t op, const std::vector<Span>& spans) const {
  if (chain_of_.empty()) return -1;
  int32_t last = -1;
  for (uint32_t c = first_[size_t(op)]; c < first_[size_t(op) + 1]; ++c)
    if (last < 0 || spans[size_t(causes_[c])].finish > spans[size_t(last)].finish) last = causes_[c];
  return last;
}

void StallFinder::charge(double seconds, const Chain& chain) {
  const double all = std::accumulate(chain.seconds.begin(), chain.seconds.end(), 0.0);
  for (int s = 0; s < kStreams && all > 0; ++s) stalls_.waited[s] += seconds * chain.seconds[s] / all;
}

const Stalls& StallFinder::find(const std::vector<Span>& spans) {
  stalls_ = {};
  double free = 0;  // when the compute stream had nothing left to do
  int32_t last = -1;
  for (int32_t i = 0; i < int32_t(spans.size()); ++i) {
    const Op& op = program_.ops[size_t(i)];
    const Span& span = spans[size_t(i)];
    const double seconds = std::max(0.0, span.finish - span.start);
    const int32_t cause = released_by(i, spans);
    if (last < 0 || span.finish > spans[size_t(last)].finish) last = i;
    if (is_exchange(op.stream)) stalls_.exchanging += seconds;
    if (on_compute(i)) {
      if (op.purpose == Purpose::restore) stalls_.restoring += seconds;
      if (cause >= 0 && !on_compute(cause))
        charge(std::max(0.0, std::min(spans[size_t(cause)].finish, span.start) - free), chain(cause));
      free = std::max(free, span.finish);
      continue;
    }
    chain(i) = cause >= 0 && !on_compute(cause) ? chain(cause) : Chain{};
    chain(i).seconds[int(op.stream)] += seconds;
  }
  if (last >= 0 && !on_compute(last)) charge(spans[size_t(last)].finish - free, chain(last));
  return stalls_;
}

}  // namespace strata
