// The executor on an asynchronous device: what is sent to it, events and graphs, waiting for it, when its ops ran; see
// executor.h.
#include <algorithm>
#include <chrono>

#include "engine/runtime/executor_parts.h"
#include "strata/device.h"

namespace strata {

void Executor::find_sent() {
  std::vector<bool> written(program_.tensors.size(), false);
  for (const Op& op : program_.ops)
    for (TensorId id : op.outputs) written[size_t(program_.whole(id).value)] = true;
  for (size_t t = 0; t < program_.tensors.size(); ++t) {
    const Tensor& tensor = program_.tensors[t];
    if (written[t]) continue;
    if (tensor.persistent && storage_.device_copy(tensor.name.text()))
      sent_.push_back({{int32_t(t)}, storage_.device_copy(tensor.name.text())});
    else if (tensor.role == Role::data && plan_.buffer_of[t] >= 0)
      sent_.push_back({{int32_t(t)}, storage_.transient(Tier::device) + plan_.buffers[plan_.buffer_of[t]].offset});
  }
}

void Executor::find_segments() {
  constexpr size_t kShortest = 4;
  Segment segment;
  const auto close = [&] {
    if (segment.ops.size() >= kShortest) {
      steps_[size_t(segment.ops.front())].segment = int(streams_->segments.size());
      for (size_t k = 1; k < segment.ops.size(); ++k) steps_[size_t(segment.ops[k])].inside = true;
      streams_->segments.push_back(segment);
    }
    segment.ops.clear();
  };
  for (int32_t i : streams_->ops[int(Stream::compute)]) {
    const Step& step = steps_[size_t(i)];
    const bool waits = std::any_of(step.waits.begin(), step.waits.end(),
                                   [](const Wait& wait) { return wait.stream != Stream::compute; });
    if (waits || (!segment.ops.empty() &&
                  program_.ops[size_t(segment.ops.back())].step_part != program_.ops[size_t(i)].step_part))
      close();
    segment.ops.push_back(i);
    if (step.event[0] >= 0) close();
  }
  close();
}

// Of the device: recorded behind the op until which an op of a step waits; -1: that is over, or on a thread.
int Executor::event_of(const Wait& wait, int64_t step) const {
  const bool before = wait.count <= 0;
  const auto& ops = streams_->ops[int(wait.stream)];
  if (!in_queue(wait.stream) || ops.empty() || (before && !is_after_another(step))) return -1;
  const int32_t op = ops[size_t((before ? int64_t(ops.size()) : 0) + wait.count) - 1];
  return steps_[size_t(op)].event[parity(before ? step - 1 : step)];
}

// An op, or the segment that it begins.
void Executor::put_into_queue(int32_t index, Segment* segment) {
  Step& step = steps_[index];
  const size_t now = parity(last_step());
  for (const Wait& wait : step.waits)
    if (const int event = event_of(wait, last_step()); event >= 0) device_->wait(step.stream, event);
  if (step.begun[now] >= 0) device_->record(step.begun[now], step.stream);
  if (!segment) {
    run_op(index, last_step());
  } else {
    if (segment->graph < 0) {
      device_->begin_capture();
      for (int32_t i : segment->ops) run_op(i, last_step());
      segment->graph = device_->end_capture();
    }
    device_->run_graph(segment->graph);
  }
  if (step.finished[now] >= 0) device_->record(step.finished[now], step.stream);
  const Step& last = segment ? steps_[size_t(segment->ops.back())] : step;
  if (last.event[now] >= 0) device_->record(last.event[now], last.stream);
}

// Ops of the device in the order of the program; those of the host run on their threads meanwhile.
void Executor::run_on_device(const PartHook* hook) {
  Streams& streams = *streams_;
  const int64_t number = last_step();
  const int start = streams.start[parity(number)];
  const bool graphs = graphs_ && streams.steps > 0 && !timed(), in_segments = graphs && !streams.has_graph;
  const auto queue_all = [&] {
    for (const Sent& sent : sent_)
      device_->copy(sent.to, pointer(sent.tensor), program_[sent.tensor].bytes(), Stream::compute);
    device_->record(start, Stream::compute);
    device_began_[parity(number)] = now(number);
    for (int s = 1; s < kStreams; ++s)
      if (in_queue(Stream(s)) && !streams.ops[s].empty()) device_->wait(Stream(s), start);
    for (int32_t i = 0; i < int32_t(steps_.size()); ++i) {
      Step& step = steps_[size_t(i)];
      if (!in_queue(step.stream) || (in_segments && step.inside)) continue;
      Segment* const segment = in_segments && step.segment >= 0 ? &streams.segments[size_t(step.segment)] : nullptr;
      const int32_t end = segment ? segment->ops.back() : i;
      for (const Wait& wait : step.waits)
        if (!in_queue(wait.stream)) wait_for_thread(wait);
      if (streams.failed.load(std::memory_order_acquire)) break;
      const auto& [first, last] = part_span_[int(program_.ops[size_t(i)].step_part)];
      if (hook && i == first) (*hook)(program_.ops[size_t(i)].step_part, true);
      put_into_queue(i, segment);
      if (hook && end == last) (*hook)(program_.ops[size_t(i)].step_part, false);
      streams.done[int(step.stream)].store(count_before(int(step.stream), number) + steps_[size_t(end)].position +
                                           1);  // as in run_stream
      if (!streams.threads.empty()) streams.done[int(step.stream)].notify_all();
    }
    for (int s = 1; s < kStreams && !overlaps(); ++s)
      if (const int end = event_of({Stream(s), counts_[size_t(s)]}, number); end >= 0)
        device_->wait(Stream::compute, end);
  };
  try {
    if (graphs && streams.graph >= 0) {
      for (int s = 0; hook && s < int(part_span_.size()); ++s)
        if (part_span_[size_t(s)].first >= 0) (*hook)(StepPart(s), true), (*hook)(StepPart(s), false);
      device_->run_graph(streams.graph);
      for (int s = 0; s < kStreams; ++s) streams.done[s] = count_before(s, number + 1);
    } else if (graphs && streams.has_graph) {
      device_->begin_capture();
      queue_all();
      streams.graph = device_->end_capture();
      device_->run_graph(streams.graph);
    } else {
      queue_all();
    }
    ++streams.steps;
  } catch (...) {
    streams.fail(std::current_exception(), number);
  }
  if (!streams.failed) return;
  for (int s = 0; s < kStreams; ++s)  // a count that was stored after the failure has hidden it from who waits for more
    if (in_queue(Stream(s))) streams.release(s);
}

// For the threads of the host's streams: until what comes before the event is done, or the step has failed.
void Executor::wait_for_event(int event, int64_t step) {
  constexpr int kLooks = 1000;  // without a pause: most waits are short
  if (event < 0) return;
  for (int looks = 0; !device_->reached(event) && streams_->failed_in.load(std::memory_order_acquire) > step; ++looks)
    if (looks > kLooks) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

// For the thread of the step, while it waits: an operation in a queue that waits for a rank that is gone would wait for
// ever, and what waits for it too.
void Executor::look_after_groups() const {
  if (!exchanges_in_queue_) return;
  for (const auto& [axis, group] : *groups_) group->watch();
}

// The same until a queue has come so far.
void Executor::wait_for_queue(const Wait& wait) {
  const int event = event_of(wait, last_step());
  while (event >= 0 && !device_->reached(event) && !streams_->failed.load(std::memory_order_acquire)) {
    look_after_groups();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

// The same until a stream that is a thread has come so far.
void Executor::wait_for_thread(const Wait& wait) {
  auto& done = streams_->done[int(wait.stream)];
  const int64_t wanted = count_before(int(wait.stream), last_step()) + wait.count;
  for (int64_t count; (count = done.load(std::memory_order_acquire)) < wanted;)
    if (exchanges_in_queue_) {
      look_after_groups();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    } else {
      done.wait(count);
    }
}

// When the step has failed, operations that wait for other ranks are given up: those may never come.
void Executor::wait_for_device() {
  if (exchanges_in_queue_) try {
      while (!device_->idle()) {
        if (streams_->failed) throw Error("the step has failed.", ExitCode::failed);
        look_after_groups();
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    } catch (...) {
      for (const auto& [axis, group] : *groups_) group->abort();
      device_->synchronize();
      throw;
    }
  device_->synchronize();
}

// When the device's ops of a step ran, as far as each queue has come, and how many those are.
VectorClock Executor::read_spans(int64_t step) {
  const size_t p = parity(step);
  VectorClock over{};
  for (int s = 0; s < kStreams; ++s) {
    if (!in_queue(Stream(s))) continue;
    for (int32_t i : streams_->ops[s]) {
      const auto at = [&](int event) { return device_began_[p] + device_->seconds_between(streams_->start[p], event); };
      if (!device_->reached(steps_[size_t(i)].finished[p])) break;
      spans_[p][size_t(i)] = {at(steps_[size_t(i)].begun[p]), at(steps_[size_t(i)].finished[p])};
      ++over[size_t(s)];
    }
  }
  return over;
}

}  // namespace strata
