// See validation.h.
#include "engine/runtime/validation.h"

#include <algorithm>
#include <vector>

#include "engine/runtime/ranks.h"

namespace strata {

Validation::Validation(const Session& session, Assembly& assembly)
    : session_(session),
      groups_(assembly.groups),
      dataset_(session.data.validation, assembly.plans.main().built.vocabulary),
      sampler_(dataset_, session.data.sequence_length, false, 0),
      executor_(assembly.executor_of(assembly.plans.validation().value())),
      feed_(executor_, session.batch(Goal::evaluate)) {}

double Validation::loss() {
  const int64_t available = sampler_.sequences() / session_.data.micro_batch;
  const int64_t batches = std::clamp<int64_t>(session_.run.validate_batches, 1, std::max<int64_t>(available, 1));
  // Those who see other sequences take turns; what there is too much of is repeated and not counted.
  const Axis& data = session_.mesh[kDataAxis];
  double sum = 0;
  for (int64_t i = 0; i < batches; i += data.size) {
    const int64_t mine = i + data.coordinate;
    feed_.fill(sampler_, mine % batches * session_.data.micro_batch);
    executor_.run();
    const bool counts = mine < batches && session_.mesh.counts();
    for (double loss : values_of_ranks(groups_, {counts ? feed_.loss() : 0})) sum += loss;
  }
  return sum / double(batches);
}

}  // namespace strata
