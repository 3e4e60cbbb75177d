// Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2): a stage holds V chunks, a microbatch goes around
// the stages V times. Microbatches go in groups of as many as there are stages, all of a group through a chunk before
// the next chunk. Bubble (P - 1) / (V M); stage p keeps the activations of 2 (P - 1 - p) + (V - 1) P + 1 chunks. The
// paper wants M to divide by P. Here groups are larger than P where it does not, so that nobody waits within a group:
// the same bubble, and up to (V - 1)(P - 1) chunks more. With fewer microbatches than stages there is one group, and
// stages wait for it to come around.
#include <algorithm>

#include "plugins/pipeline/schedules/schedules.h"

namespace strata::pipeline {

Schedule interleaved(const Problem& problem) {
  const int stages = problem.stages, chunks = problem.chunks;
  std::vector<Pass> forward, backward;  // the same on all stages
  const int groups = std::max(1, problem.microbatches / stages);
  const int size = (problem.microbatches + groups - 1) / groups;  // of the largest
  for (int group = 0, first = 0, end = 0; group < groups; ++group, first = end) {
    end = first + (problem.microbatches - first) / (groups - group);
    for (int c = 0; c < chunks; ++c)
      for (int m = first; m < end; ++m) {
        forward.push_back(forward_pass(c, m));
        backward.push_back(backward_pass(chunks - 1 - c, m));
      }
  }
  Schedule schedule{.stage_of = round_robin(stages, chunks)};
  for (int stage = 0; stage < stages; ++stage) {
    // With one chunk it is 1F1B. With more, what a stage ends next was begun a group ago for each further chunk.
    const int around = chunks == 1 ? stages - 1 - stage : 2 * (stages - 1 - stage) + (chunks - 1) * size;
    const size_t ahead = std::min(forward.size(), size_t(around));
    std::vector<Pass> order(forward.begin(), forward.begin() + int64_t(ahead));
    for (size_t n = 0; n < backward.size(); ++n) {
      if (n + ahead < forward.size()) order.push_back(forward[n + ahead]);
      order.push_back(backward[n]);
    }
    schedule.order.push_back(std::move(order));
  }
  return schedule;
}

}  // namespace strata::pipeline
