// What the watchdog asks of an executor: how far its streams are, and at which op each stands.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "engine/runtime/executor_parts.h"
#include "strata/device.h"

namespace strata {

void Executor::watch(double patience) {
  const auto ends = [](const std::string& where) {
    return Error("nothing moved in this step any more: " + where, ExitCode::failed);
  };
  watchdog_ = std::make_unique<Watchdog>(
      Watchdog::Watched{
          .progress = [this]() -> int64_t {
            try {
              return progress();
            } catch (...) {  // what failed on the device
              streams_->fail(std::current_exception());
              return -1;
            }
          },
          .where = [this] { return positions(); },
          .end = [this, ends](const std::string& where) { streams_->fail(std::make_exception_ptr(ends(where))); },
          .leave =
              [ends](const std::string& where) {
                std::fprintf(stderr, "strata: %s It cannot be stopped; this process ends.\n", ends(where).what());
                std::_Exit(int(ExitCode::failed));
              }},
      patience, std::min(60.0, patience));
}

// Counts what is done: ops that threads have run, and ops of queues behind which an event was reached. Events are asked
// for of steps under way alone: those of others may have been captured.
int64_t Executor::progress() {
  Streams& streams = *streams_;
  const int64_t step = streams.begun;
  int64_t sum = step;
  for (int s = 0; s < kStreams; ++s) {
    const auto& ops = streams.ops[s];
    const int64_t done = std::min(streams.done[s].load(std::memory_order_acquire), count_before(s, step + 1));
    sum += done;
    if (!in_queue(Stream(s)) || ops.empty()) continue;
    int64_t& reached = streams.reached[s];
    reached = std::max(reached, count_before(s, is_after_another(step) ? step - 1 : step));
    for (int64_t k = reached; k < done && !streams.failed; ++k) {
      const int64_t size = int64_t(ops.size());
      const int event = steps_[size_t(ops[size_t(k % size)])].event[parity(k / size + 1)];
      if (event < 0) continue;
      if (!device_->reached(event)) break;
      reached = k + 1;
    }
    sum += reached;
  }
  return sum;
}

std::string Executor::positions() const {
  std::string text;
  for (int s = 0; s < kStreams; ++s) {
    const auto& ops = streams_->ops[s];
    if (ops.empty()) continue;
    const bool queue = in_queue(Stream(s));
    const int64_t done = streams_->done[s].load(std::memory_order_acquire) - count_before(s, last_step());
    int64_t at = queue ? streams_->reached[s] - count_before(s, last_step()) : done;
    const int64_t more = done - at;
    text += (text.empty() ? "" : "; ") + std::string(name_of(Stream(s)));
    if (at >= int64_t(ops.size())) {
      text += " is done";
      continue;
    }
    if (at < 0) text += ", in the step before,", at += int64_t(ops.size());
    const Op& op = program_.ops[size_t(ops[size_t(at)])];
    text += " stands at op " + std::to_string(ops[size_t(at)]) + " (" + op.kind->name +
            (op.outputs.empty() ? "" : ", makes " + program_[op.outputs[0]].name) + ")";
    if (queue) text += ", with " + std::to_string(std::max<int64_t>(more, 0)) + " more in its queue";
  }
  return text + ".";
}

}  // namespace strata
