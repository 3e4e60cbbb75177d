// See validation.h.
#include "engine/runtime/validation.h"

#include <algorithm>
#include <vector>

#include "engine/runtime/ranks.h"

namespace strata {

Validation::Validation(const Session& session, const World& world, Assembly& assembly)
    : session_(session),
      world_(world),
      groups_(assembly.groups),
      dataset_(session.data.validation, assembly.plans.main().built.vocabulary),
      sampler_(dataset_, session.data.sequence_length, false, 0),
      executor_(assembly.executor_of(assembly.plans.validation().value())),
      feed_(executor_, session.batch(Goal::evaluate)) {}

double Validation::loss() {
  const int64_t available = sampler_.sequences() / session_.data.micro_batch;
  const int64_t batches = std::clamp<int64_t>(session_.run.validate_batches, 1, std::max<int64_t>(available, 1));
  // Ranks take turns; what there is too much of is repeated and not counted.
  const int64_t ranks = world_.size();
  double sum = 0;
  for (int64_t i = 0; i < batches; i += ranks) {
    const int64_t mine = (i + world_.rank()) % batches;
    feed_.fill(sampler_, mine * session_.data.micro_batch);
    executor_.run();
    const std::vector<double> losses = values_of_ranks(groups_, {feed_.loss()});
    for (int64_t r = 0; r < ranks && i + r < batches; ++r) sum += losses[size_t(r)];
  }
  return sum / double(batches);
}

}  // namespace strata
