// Whether steps can come to their end: the waits of a device's queues, of the threads beside it and of the thread that
// fills the queues, taken together.
#pragma once
#include <functional>
#include <vector>

#include "engine/planning/dependencies.h"

namespace strata {

// Runs the waits without the ops. A stream for which `queued` says yes is a queue: its ops are put into it by one
// thread in the order of the program, those of a `run` all at once with the first of them, and each only when the
// threads that it waits for are done so far; within the queue they wait for other queues. Other streams are threads.
// Where ops wait for those of the step before, two steps are run, and the second begins when of each stream as many ops
// are over as are `awaited`. Throws Error (failed) saying at which op each stream would stand for ever.
void require_progress(const Program& program, const Waits& waits, const VectorClock& awaited,
                      const std::function<bool(Stream)>& queued, const std::vector<std::vector<int32_t>>& runs = {});

}  // namespace strata
