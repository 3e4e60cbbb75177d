// The schedules of this plugin, each in a file of its own that names its paper; and what they share.
#pragma once
#include <string>
#include <string_view>

#include "strata/pipeline_schedule.h"

namespace strata::pipeline {

Schedule gpipe(const Problem& problem);
Schedule one_forward_one_backward(const Problem& problem);
Schedule interleaved(const Problem& problem);
Schedule breadth_first(const Problem& problem);
Schedule zero_bubble_h1(const Problem& problem);
Schedule zero_bubble_h2(const Problem& problem);
Schedule zero_bubble_v(const Problem& problem);
Schedule zero_bubble(const Problem& problem);
Schedule two_buffered_weights(const Problem& problem);
Schedule pipedream(const Problem& problem);

// All of them, under the names that `schedule` of the plugin takes. For its constructor.
void register_schedules();

// Error unless a stage holds `chunks`.
void require_chunks(const Problem& problem, std::string_view schedule, int chunks);
void require_microbatches(const Problem& problem, std::string_view schedule, int least);

// What the first step has of an order: there are no microbatches of the step before.
std::vector<Pass> without_begun(std::vector<Pass> order);

// One forward pass, one backward pass, from step to step: a stage leaves to the next step the backward passes of as
// many microbatches as there are stages after it, which must not be more than a step has.
Schedule without_flush(const Problem& problem);

// Short names for lists of passes.
inline Pass forward_pass(int chunk, int microbatch) { return {Pass::Part::forward, chunk, microbatch}; }
inline Pass backward_pass(int chunk, int microbatch) { return {Pass::Part::backward, chunk, microbatch}; }

inline Pass input_gradient(int chunk, int microbatch) { return {Pass::Part::input_gradient, chunk, microbatch}; }
inline Pass weight_gradient(int chunk, int microbatch) { return {Pass::Part::weight_gradient, chunk, microbatch}; }

}  // namespace strata::pipeline
