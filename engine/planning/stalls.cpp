// One pass in the order of the program; see stalls.h.
#include "engine/planning/stalls.h"

#include <algorithm>
#include <numeric>

namespace strata {

double Stalls::total() const { return std::accumulate(waited.begin(), waited.end(), restoring); }

StallFinder::StallFinder(const Program& program, const Waits& waits)
    : program_(program), counts_(ops_by_stream(program)) {
  const auto is_compute = [](const Op& op) { return op.stream == Stream::compute; };
  if (std::all_of(program.ops.begin(), program.ops.end(), is_compute)) return;  // nothing to wait for
  std::array<std::vector<int32_t>, kStreams> ops;                               // by stream
  for (size_t i = 0; i < program.ops.size(); ++i) ops[size_t(program.ops[i].stream)].push_back(int32_t(i));
  VectorClock begun{};
  int32_t chains = 0;
  for (auto* by_op : {&causes_, &chain_of_}) by_op->reserve(program.ops.size());
  first_.reserve(program.ops.size() + 1);
  const auto add = [&](Stream stream, int32_t count) {  // the op with which so many of a stream are over
    const auto& list = ops[size_t(stream)];
    causes_.push_back(count > 0 ? list[size_t(count) - 1] : -1 - list[list.size() - 1 + size_t(count)]);
  };
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Stream stream = program.ops[i].stream;
    add(stream, begun[size_t(stream)]++);
    for (const Wait& wait : waits[i])
      if (size_t(-std::min(wait.count, 0)) < ops[size_t(wait.stream)].size()) add(wait.stream, wait.count);
    first_.push_back(uint32_t(causes_.size()));
    chain_of_.push_back(stream == Stream::compute ? -1 : chains++);
  }
  chains_.resize(size_t(chains));
  chains_before_.resize(size_t(chains));
}

// What the op waited for and was done last.
StallFinder::Released StallFinder::released(int32_t op, const std::vector<Span>& spans,
                                            const std::vector<Span>* before) const {
  Released last{.by = kNothing, .at = 0};
  if (chain_of_.empty()) return last;
  for (uint32_t c = first_[size_t(op)]; c < first_[size_t(op) + 1]; ++c) {
    const int32_t cause = causes_[c];
    if (cause < 0 && !before) continue;
    const double at = cause >= 0 ? spans[size_t(cause)].finish : (*before)[size_t(-1 - cause)].finish;
    if (last.by == kNothing || at > last.at) last = {cause, at};
  }
  return last;
}

// Null where chains end.
const StallFinder::Chain* StallFinder::chain(int32_t cause) const {
  if (cause == kNothing) return nullptr;
  const bool is_before = cause < 0;
  const int32_t op = is_before ? -1 - cause : cause;
  return on_compute(op) ? nullptr : &(is_before ? chains_before_ : chains_)[size_t(chain_of_[size_t(op)])];
}

void StallFinder::follow(int32_t op, const Chain* from, double seconds) {
  Chain& own = chains_[size_t(chain_of_[size_t(op)])];
  own = from ? *from : Chain{};
  own.seconds[size_t(program_.ops[size_t(op)].stream)] += seconds;
}

void StallFinder::charge(double seconds, const Chain& chain) {
  const double all = std::accumulate(chain.seconds.begin(), chain.seconds.end(), 0.0);
  for (int s = 0; s < kStreams && all > 0; ++s) stalls_.waited[s] += seconds * chain.seconds[s] / all;
}

const Stalls& StallFinder::find(const std::vector<Span>& spans) {
  return find({.spans = spans, .over = counts_, .awaited = counts_}, nullptr);
}

const Stalls& StallFinder::find(const PartOfStep& step, const std::vector<Span>* before) {
  stalls_ = {};
  double free = 0;                  // when the compute stream had nothing left to do
  Released last{kNothing, -1e300};  // what is awaited and over last
  if (chain_of_.empty()) before = nullptr;
  for (int32_t i = 0; before && i < int32_t(before->size()); ++i) {
    const Span& span = (*before)[size_t(i)];
    if (!on_compute(i)) follow(i, chain(released(i, *before, nullptr).by), std::max(0.0, span.finish - span.start));
    if (span.finish > last.at) last = {-1 - i, span.finish};
  }
  if (before) std::swap(chains_, chains_before_);
  VectorClock begun{};
  for (int32_t i = 0; i < int32_t(step.spans.size()); ++i) {
    const Op& op = program_.ops[size_t(i)];
    const int32_t number = begun[size_t(op.stream)]++;
    if (number >= step.over[size_t(op.stream)]) continue;
    const Span& span = step.spans[size_t(i)];
    const double seconds = std::max(0.0, span.finish - span.start);
    const Released cause = released(i, step.spans, before);
    const Chain* const from = chain(cause.by);
    if (number < step.awaited[size_t(op.stream)] && span.finish > last.at) last = {i, span.finish};
    if (is_exchange(op.stream)) stalls_.exchanging += seconds;
    if (on_compute(i)) {
      if (op.purpose == Purpose::restore) stalls_.restoring += seconds;
      if (from) charge(std::max(0.0, std::min(cause.at, span.start) - free), *from);
      free = std::max(free, span.finish);
    } else {
      follow(i, from, seconds);
    }
  }
  if (const Chain* const at_end = chain(last.by)) charge(std::max(0.0, last.at - free), *at_end);
  return stalls_;
}

}  // namespace strata
