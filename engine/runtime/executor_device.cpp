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
    if (step.event >= 0) close();
  }
  close();
}

// An op, or the segment that it begins.
void Executor::put_into_queue(int32_t index, Segment* segment) {
  Step& step = steps_[index];
  for (const Wait& wait : step.waits)
    if (in_queue(wait.stream) && wait.stream != step.stream)
      device_->wait(step.stream, steps_[size_t(streams_->ops[int(wait.stream)][size_t(wait.count) - 1])].event);
  if (step.begun >= 0) device_->record(step.begun, step.stream);
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
  if (step.finished >= 0) device_->record(step.finished, step.stream);
  const Step& last = segment ? steps_[size_t(segment->ops.back())] : step;
  if (last.event >= 0) device_->record(last.event, last.stream);
}

// Ops of the device in the order of the program; those of the host run on their threads meanwhile.
void Executor::run_on_device(const PartHook* hook) {
  Streams& streams = *streams_;
  const bool graphs = graphs_ && streams.steps > 0 && !timed(), in_segments = graphs && !streams.has_graph;
  const auto queue_all = [&] {
    for (const Sent& sent : sent_)
      device_->copy(sent.to, pointer(sent.tensor), program_[sent.tensor].bytes(), Stream::compute);
    device_->record(streams.start, Stream::compute);
    device_began_ = now(last_step());
    for (int s = 1; s < kStreams; ++s)
      if (in_queue(Stream(s)) && !streams.ops[s].empty()) device_->wait(Stream(s), streams.start);
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
      streams.done[int(step.stream)].store(steps_[size_t(end)].position + 1);  // as in run_stream
      if (!streams.threads.empty()) streams.done[int(step.stream)].notify_all();
    }
    for (int s = 1; s < kStreams; ++s)
      if (in_queue(Stream(s)) && !streams.ops[s].empty())
        device_->wait(Stream::compute, steps_[size_t(streams.ops[s].back())].event);
  };
  try {
    if (graphs && streams.graph >= 0) {
      for (int s = 0; hook && s < int(part_span_.size()); ++s)
        if (part_span_[size_t(s)].first >= 0) (*hook)(StepPart(s), true), (*hook)(StepPart(s), false);
      device_->run_graph(streams.graph);
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
    streams.fail(std::current_exception());
  }
  if (!streams.failed) return;
  for (int s = 0; s < kStreams; ++s)  // a count that was stored after the failure has hidden it from who waits for more
    if (in_queue(Stream(s))) streams.release(s);
}

// For the threads of the host's streams: until what comes before the event is done, or the step has failed.
void Executor::wait_for_event(int event) {
  constexpr int kLooks = 1000;  // without a pause: most waits are short
  for (int looks = 0; !device_->reached(event) && !streams_->failed.load(std::memory_order_acquire); ++looks)
    if (looks > kLooks) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

// For the thread of the step, until a stream that is a thread has come so far. Meanwhile it looks after the groups with
// operations in a queue: one that waits for a rank that is gone would wait for ever, and what waits for it too.
void Executor::wait_for_thread(const Wait& wait) {
  auto& done = streams_->done[int(wait.stream)];
  const int64_t wanted = count_before(int(wait.stream), last_step()) + wait.count;
  for (int64_t count; (count = done.load(std::memory_order_acquire)) < wanted;)
    if (exchanges_in_queue_) {
      for (const auto& [axis, group] : *groups_) group->watch();
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
        for (const auto& [axis, group] : *groups_) group->watch();
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    } catch (...) {
      for (const auto& [axis, group] : *groups_) group->abort();
      device_->synchronize();
      throw;
    }
  device_->synchronize();
}

// When the device's ops ran.
void Executor::read_spans() {
  for (size_t i = 0; i < steps_.size(); ++i)
    if (steps_[i].begun >= 0)
      spans_[0][i] = {device_began_ + device_->seconds_between(streams_->start, steps_[i].begun),
                      device_began_ + device_->seconds_between(streams_->start, steps_[i].finished)};
}

}  // namespace strata
