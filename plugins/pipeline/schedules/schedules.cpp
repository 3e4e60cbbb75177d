// The plugin's schedules by name.
#include "plugins/pipeline/schedules/schedules.h"

namespace strata::pipeline {

void register_schedules() {
  register_schedule({"gpipe", "all forward passes, then all backward ones (arXiv 1811.06965)", 1, gpipe});
  register_schedule({"1f1b", "one forward pass, one backward pass, with flush (arXiv 2006.09503, PipeDream-flush)", 1,
                     one_forward_one_backward});
}

void require_chunks(const Problem& problem, std::string_view schedule, int chunks) {
  if (problem.chunks != chunks)
    throw Error("schedule " + std::string(schedule) + " has " + std::to_string(chunks) +
                (chunks == 1 ? " chunk" : " chunks") + " a stage, not " + std::to_string(problem.chunks) +
                ". Set chunks = " + std::to_string(chunks) + ", or take a schedule for any number (interleaved, " +
                "breadth_first).");
}

void require_microbatches(const Problem& problem, std::string_view schedule, int least) {
  if (problem.microbatches < least)
    throw Error("schedule " + std::string(schedule) + " over " + std::to_string(problem.stages) +
                " stages needs at least " + std::to_string(least) + " microbatches a step, and there " +
                (problem.microbatches == 1 ? "is 1" : "are " + std::to_string(problem.microbatches)) +
                ". Make data.micro_batch smaller or data.global_batch larger.");
}

}  // namespace strata::pipeline
