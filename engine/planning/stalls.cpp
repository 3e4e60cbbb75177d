// One pass in the order of the program; see stalls.h.
#include "engine/planning/stalls.h"

#include <algorithm>
#include <numeric>

namespace strata {

double Stalls::total() const { return std::accumulate(waited.begin(), waited.end(), restoring); }

StallFinder::StallFinder(const Program& program, const std::vector<std::vector<Wait>>& waits)
    : program_(program), causes_(program.ops.size()), chains_(program.ops.size()) {
  std::array<std::vector<int32_t>, kStreams> ops;  // by stream
  for (size_t i = 0; i < program.ops.size(); ++i) {
    auto& own = ops[int(program.ops[i].stream)];
    if (!own.empty()) causes_[i].push_back(own.back());
    for (const Wait& wait : waits[i])
      if (wait.count > 0) causes_[i].push_back(ops[int(wait.stream)][size_t(wait.count) - 1]);
    own.push_back(int32_t(i));
  }
}

// What the op waited for and was done last; -1: nothing.
int32_t StallFinder::released_by(int32_t op, const std::vector<Span>& spans) const {
  int32_t last = -1;
  for (int32_t cause : causes_[size_t(op)])
    if (last < 0 || spans[size_t(cause)].finish > spans[size_t(last)].finish) last = cause;
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
    if (op.stream == Stream::compute) {
      if (op.purpose == Purpose::restore) stalls_.restoring += seconds;
      if (cause >= 0 && program_.ops[size_t(cause)].stream != Stream::compute)
        charge(std::max(0.0, std::min(spans[size_t(cause)].finish, span.start) - free), chains_[size_t(cause)]);
      free = std::max(free, span.finish);
      continue;
    }
    Chain& chain = chains_[size_t(i)];
    chain = cause >= 0 && program_.ops[size_t(cause)].stream != Stream::compute ? chains_[size_t(cause)] : Chain{};
    chain.seconds[int(op.stream)] += seconds;
  }
  if (last >= 0 && program_.ops[size_t(last)].stream != Stream::compute)
    charge(spans[size_t(last)].finish - free, chains_[size_t(last)]);
  return stalls_;
}

}  // namespace strata
