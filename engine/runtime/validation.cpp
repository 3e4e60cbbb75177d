// See validation.h.
#include "engine/runtime/validation.h"

#include <algorithm>
#include <vector>

#include "engine/runtime/ranks.h"

namespace strata {

namespace {

// Of the targets of the first samples, those that count.
double counted_share(const Mixture& data, int64_t samples, int64_t sequence_length) {
  int64_t counted = 0;
  for (int64_t sample = 0; sample < samples; ++sample) counted += data.counted(sample);
  return double(counted) / double(samples * sequence_length);
}

}  // namespace

Validation::Validation(const Session& session, Assembly& assembly)
    : session_(session),
      groups_(assembly.groups),
      data_(session, Goal::evaluate, assembly.plans.main().built.vocabulary),
      batches_(std::clamp<int64_t>(session.run.validate_batches, 1,
                                   std::max<int64_t>(data_.mixture().of(0).sequences() / session.data.micro_batch, 1))),
      counted_(counted_share(data_.mixture(), batches_ * session.data.micro_batch, session.data.sequence_length)),
      executor_(assembly.executor_of(assembly.plans.validation().value())),
      feed_(executor_, session.batch(Goal::evaluate)) {
  if (counted_ == 0)
    throw Error(session.data.validation.front() + ": the loss masks let no token of the first " +
                std::to_string(batches_) + " microbatches count; raise run.validate_batches, or use other data.");
}

double Validation::loss() {
  // Those who see other sequences take turns; what there is too much of is repeated and not counted.
  const Axis& data = session_.mesh[kDataAxis];
  double sum = 0;
  for (int64_t i = 0; i < batches_; i += data.size) {
    const int64_t mine = i + data.coordinate;
    feed_.fill(data_.mixture(), mine % batches_ * session_.data.micro_batch);
    executor_.run();
    const bool counts = mine < batches_ && session_.mesh.counts();
    for (double loss : values_of_ranks(groups_, {counts ? feed_.loss() : 0})) sum += loss;
  }
  return sum / double(batches_) / counted_;  // each is by all tokens of a microbatch, also where some do not count
}

}  // namespace strata
