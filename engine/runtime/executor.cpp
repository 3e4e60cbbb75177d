// Steps and their streams; see executor.h. Ops are bound in executor_binding.cpp.
#include "engine/runtime/executor.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/clock.h"
#include "engine/planning/progress.h"
#include "engine/runtime/executor_parts.h"
#include "strata/device.h"

namespace strata {
namespace {

bool is_watched(const Program& program, TensorId id) {
  const Tensor& tensor = program[id];
  return tensor.step_output && elements(tensor.shape) == 1 &&
         (tensor.dtype == DType::f32 || tensor.dtype == DType::f64);
}

template <class T>
bool all_finite(const void* data, int64_t count) {
  const T* values = static_cast<const T*>(data);
  return std::all_of(values, values + count, [](T value) { return std::isfinite(value); });
}

bool finite(const Tensor& tensor, const void* data) {
  if (tensor.dtype == DType::f32) return all_finite<float>(data, elements(tensor.shape));
  if (tensor.dtype == DType::f64) return all_finite<double>(data, elements(tensor.shape));
  return true;
}

}  // namespace

Executor::Executor(const Program& program, const MemoryPlan& plan, Storage& storage, const std::string& backend,
                   Threads& compute, int host_threads, const Groups* groups, double patience)
    : program_(program),
      plan_(plan),
      storage_(storage),
      backend_(backend),
      device_(storage.device()),
      groups_(groups),
      exchanges_in_queue_(device_ && groups && exchanges_in_queue(*groups)),
      pointers_(program.tensors.size(), nullptr),
      streams_(std::make_unique<Streams>()) {
  const auto on_host = [](const Op& op) { return op.stream == Stream::host; };
  if (std::any_of(program.ops.begin(), program.ops.end(), on_host))
    streams_->host = std::make_unique<Threads>(host_threads, compute.cut());
  place_tensors();
  if (device_) find_sent();
  counts_ = ops_by_stream(program);
  const StepWaits planned = device_ && !steps_overlap(program)
                                ? StepWaits{.waits = plan_waits(program, plan), .awaited = counts_}
                                : plan_overlapping_waits(program, plan);
  const Waits& waits = planned.waits;
  awaited_ = planned.awaited;
  stall_finder_.emplace(program, waits);
  if (!device_)
    for (std::vector<Span>& spans : spans_) spans.resize(program.ops.size());
  uint64_t* next_fault = make_faults();
  part_span_.assign(6, {-1, -1});
  steps_.resize(program.ops.size());
  hold_scalars();
  for (int32_t i = 0; i < int32_t(program.ops.size()); ++i) {
    steps_[size_t(i)].waits.assign(waits[size_t(i)].begin(), waits[size_t(i)].end());
    put_into_stream(i);
    bind_op(i, compute, next_fault);
  }
  if (device_) make_events();
  check_progress();
  start_streams(patience);
}

void Executor::put_into_stream(int32_t index) {
  const Op& op = program_.ops[size_t(index)];
  Step& step = steps_[size_t(index)];
  std::vector<int32_t>& ops = streams_->ops[int(op.stream)];
  step.stream = op.stream;
  step.position = int32_t(ops.size());
  ops.push_back(index);
  for (TensorId id : op.outputs)
    if (is_watched(program_, id)) step.watched.push_back(id);
  if (op.stream != Stream::compute) return;
  auto& [first, last] = part_span_[size_t(op.step_part)];
  if (first < 0) first = index;
  last = index;
}

// One for the step and one for the one before it, where they are under way at once.
std::array<int, 2> Executor::make_events(bool timed) const {
  const int event = device_->make_event(timed);
  return {event, awaited_ == counts_ ? event : device_->make_event(timed)};
}

// Of ops that others in the device's queues wait for, of what ends a step for the next, and of the end of each queue,
// for which the compute queue waits.
void Executor::make_events() {
  const auto make = [&](const Wait& wait) {
    const auto& ops = streams_->ops[int(wait.stream)];
    if (!in_queue(wait.stream) || ops.empty()) return;
    auto& event = steps_[size_t(ops[size_t(wait.count > 0 ? wait.count : int64_t(ops.size()) + wait.count) - 1])].event;
    if (event[0] < 0) event = make_events(false);
  };
  streams_->has_graph = true;
  for (const Step& step : steps_) {
    streams_->has_graph &= in_queue(step.stream);
    for (const Wait& wait : step.waits) make(wait);
  }
  for (int s = 0; s < kStreams; ++s)
    for (const int32_t count : {counts_[size_t(s)], awaited_[size_t(s)]}) make({Stream(s), count});
  streams_->start = make_events(true);
  if (!streams_->has_graph) find_segments();
}

// A thread for each stream beside this thread's.
void Executor::start_streams(double patience) {
  const auto follow = [this](int s) {
    for (int64_t step = 1;; ++step) {
      int64_t started = streams_->started.load();
      for (; started < step; started = streams_->started.load()) streams_->started.wait(started);
      if (streams_->stop && started == step) return;  // what began before is brought to its end
      run_stream(s, step, nullptr);
      if (streams_->running.fetch_sub(1) == 1) streams_->running.notify_all();
    }
  };
  try {
    for (int s = 1; s < kStreams; ++s)
      if (!streams_->ops[s].empty() && !in_queue(Stream(s)))
        streams_->threads.push_back(start_thread("the stream " + std::string(name_of(Stream(s))), [=] { follow(s); }));
    if (device_ || !streams_->threads.empty()) watch(patience);  // one stream waits for nobody
  } catch (...) {
    streams_->end();
    throw;
  }
}

Executor::~Executor() {
  watchdog_.reset();
  streams_->end();
  if (!goes_on_) return;
  storage_.hold(nullptr);
  try {
    if (device_) device_->synchronize();
  } catch (const Error&) {  // of a run that is over
  }
}

bool Executor::in_queue(Stream stream) const {
  return device_ && (on_device(stream) || (is_exchange(stream) && exchanges_in_queue_));
}

// Whether the next step is captured as one graph, or runs as one.
bool Executor::is_one_graph() const {
  return device_ && graphs_ && streams_->has_graph && streams_->steps > 0 && !timed();
}

double Executor::now(int64_t step) const { return seconds_now() - step_began_[parity(step)]; }

void Executor::run_op(int32_t index, int64_t step_number) {
  Step& step = steps_[index];
  const bool timed = this->timed() && !in_queue(step.stream);
  const double start = timed ? now(step_number) : 0;
  try {
    step_number % 2 && step.odd ? step.odd() : step.launch();
  } catch (const Error& error) {
    throw Error("op " + std::to_string(index) + " (" + program_.ops[index].kind->name + "): " + error.what(),
                error.code());
  } catch (const std::bad_alloc&) {
    throw Error("op " + std::to_string(index) + " (" + program_.ops[index].kind->name + "): out of memory.",
                ExitCode::failed);
  } catch (const std::exception& error) {
    throw Error("op " + std::to_string(index) + " (" + program_.ops[index].kind->name + "): " + error.what(),
                ExitCode::failed);
  }
  if (timed) spans_[parity(step_number)][size_t(index)] = {start, now(step_number)};
  if (in_queue(step.stream)) return;
  for (TensorId id : step.watched)
    if (!finite(program_[id], pointer(id))) throw NonFinite(program_[id].name);
}

// Ops of a stream in the steps before.
int64_t Executor::count_before(int stream, int64_t step) const { return (step - 1) * int64_t(counts_[size_t(stream)]); }

int64_t Executor::last_step() const { return streams_->begun; }

void Executor::run_stream(int stream, int64_t step, const PartHook* hook) {
  Streams& streams = *streams_;
  try {
    int64_t finished = count_before(stream, step);
    for (int32_t i : streams.ops[stream]) {
      for (const Wait& wait : steps_[i].waits)
        streams.wait(int(wait.stream), count_before(int(wait.stream), step) + wait.count);
      if (device_)
        for (const Wait& wait : steps_[i].waits) wait_for_event(event_of(wait, step), step);
      if (streams.failed_in.load(std::memory_order_acquire) <= step) {
        streams.release(stream);
        return;
      }
      const auto& [first, last] = part_span_[int(program_.ops[i].step_part)];
      if (hook && i == first) (*hook)(program_.ops[i].step_part, true);
      run_op(i, step);
      if (hook && i == last) (*hook)(program_.ops[i].step_part, false);
      streams.done[stream].store(++finished);  // not release alone: notify_all looks afterwards whether anybody waits
      if (!streams.threads.empty()) streams.done[stream].notify_all();
    }
  } catch (...) {
    streams.fail(std::current_exception(), step);
  }
}

Waits Executor::waits() const {
  Waits waits;
  for (const Step& step : steps_) waits.push_back(step.waits);
  return waits;
}

std::vector<ExchangeStep> Executor::exchanges() const {
  return exchanges_of(program_, waits(), [this](Stream stream) { return in_queue(stream); });
}

// With ops one by one and with those of the runs at once.
void Executor::check_progress() const {
  const Waits waits = this->waits();
  const auto queued = [this](Stream stream) { return in_queue(stream); };
  require_progress(program_, waits, awaited_, queued);
  std::vector<std::vector<int32_t>> segments;
  for (const Segment& segment : streams_->segments) segments.push_back(segment.ops);
  if (!segments.empty()) require_progress(program_, waits, awaited_, queued, segments);
}

namespace {

// From here on: of what was counted in the step before, the watchdog would ask for events of a captured graph.
struct Watched {
  explicit Watched(Watchdog* dog) : dog(dog) {
    if (dog) dog->begin();
  }
  ~Watched() {
    if (dog) dog->end();
  }
  Watchdog* dog;
};

}  // namespace

void Executor::run(const PartHook& hook, bool goes_on) {
  Streams& streams = *streams_;
  begin_step();
  const int64_t step = last_step();
  const Watched watched(is_one_graph() ? nullptr : watchdog_.get());
  if (!streams.threads.empty()) {
    streams.running += int(streams.threads.size());
    ++streams.started;
    streams.started.notify_all();
  }
  if (device_)
    run_on_device(hook ? &hook : nullptr);
  else
    run_stream(0, step, hook ? &hook : nullptr);
  end_step(goes_on && overlaps());
  if (streams.failed) end_failed();
  if (timed()) find_stalls(!goes_on_);
}

bool Executor::overlaps() const { return !streams_->threads.empty() && awaited_ != counts_; }

// Until the next step may begin, or nothing is left of this one.
void Executor::end_step(bool goes_on) {
  Streams& streams = *streams_;
  const auto watching = [&](const auto& wait) {
    try {
      wait();
    } catch (...) {
      streams.fail(std::current_exception(), last_step());
    }
  };
  if (goes_on) watching([&] { wait_for_awaited(); });
  if (goes_on && !streams.failed && !(device_ && left_on_device())) {
    goes_on_ = true;
    storage_.hold(this);
    return;
  }
  for (int s = 1; s < kStreams && !streams.threads.empty(); ++s)  // what is left when nothing is left to compute
    if (!in_queue(Stream(s))) watching([&] { wait_for_thread({Stream(s), counts_[size_t(s)]}); });
  end_threads();
  if (device_) end_on_device();
}

// What the host looks at between steps is there, and nothing is left of the step before.
void Executor::wait_for_awaited() {
  for (int s = device_ ? 0 : 1; s < kStreams; ++s) {
    const Wait wait{Stream(s), awaited_[size_t(s)]};
    in_queue(wait.stream) ? wait_for_queue(wait) : wait_for_thread(wait);
  }
}

void Executor::drain() {
  if (!goes_on_) return;
  const Watched watched(watchdog_.get());
  end_threads();
  if (device_) end_on_device();
  if (streams_->failed) end_failed();
  if (timed() && device_) read_spans(last_step());
}

void Executor::begin_step() {
  Streams& streams = *streams_;
  stalls_ = {};
  STRATA_CHECK(storage_.holder() == nullptr || storage_.holder() == this);
  const int64_t step = ++streams.begun;
  after_another_[parity(step)] = std::exchange(goes_on_, false);
  step_began_[parity(step)] = seconds_now();
  for (Held& held : held_) held.values[size_t(step % 2)] = *held.from;
}

// Nothing is left of any step.
void Executor::end_threads() {
  for (int left = streams_->running; left > 0; left = streams_->running) streams_->running.wait(left);
  goes_on_ = false;
  storage_.hold(nullptr);
}

// The executor is as before its first step, but for what the storage holds.
void Executor::end_failed() {
  Streams& streams = *streams_;
  end_threads();
  for (int s = 0; s < kStreams; ++s) streams.done[s] = count_before(s, last_step() + 1);
  streams.failed = false;
  streams.failed_in = INT64_MAX;
  const std::exception_ptr error = std::exchange(streams.error, nullptr);
  std::rethrow_exception(error);
}

// Nothing is left in the device's queues.
void Executor::end_on_device() {
  Streams& streams = *streams_;
  try {
    wait_for_device();
  } catch (...) {
    if (!streams.error) streams.fail(std::current_exception());
  }
  if (const std::exception_ptr left = streams.error ? nullptr : left_on_device()) streams.fail(left);
}

// What is wrong with what the device's kernels left; null: nothing.
std::exception_ptr Executor::left_on_device() const {
  for (size_t i = 0; i < steps_.size(); ++i)
    if (const Step& step = steps_[i]; step.fault && *step.fault != 0) {
      const OpView view(program_, program_.ops[i]);
      const std::string what = view.op().kind->kernels.find(backend_)->second.fault(view, *step.fault);
      return std::make_exception_ptr(
          Error("op " + std::to_string(i) + " (" + view.op().kind->name + "): " + what, ExitCode::failed));
    }
  for (const Step& step : steps_)
    for (TensorId id : step.watched)
      if (in_queue(step.stream) && !finite(program_[id], pointer(id)))
        return std::make_exception_ptr(NonFinite(program_[id].name));
  return nullptr;
}

// What is not over yet has no spans; the step before is over.
void Executor::find_stalls(bool drained) {
  const int64_t step = last_step();
  const VectorClock read = device_ ? read_spans(step) : VectorClock{};
  PartOfStep part{.spans = spans_[parity(step)],
                  .over = counts_,
                  .awaited = drained && !is_after_another(step) ? counts_ : awaited_};
  for (int s = 0; s < kStreams && !drained; ++s)
    part.over[size_t(s)] =
        in_queue(Stream(s))
            ? read[size_t(s)]
            : int32_t(std::clamp<int64_t>(streams_->done[s].load(std::memory_order_acquire) - count_before(s, step), 0,
                                          counts_[size_t(s)]));
  if (!is_after_another(step)) {
    stalls_ = stall_finder_->find(part, nullptr);
    return;
  }
  // On the clock of this step while the finder looks.
  if (device_) read_spans(step - 1);  // what was not over yet
  std::vector<Span>& before = spans_[parity(step - 1)];
  const double earlier = step_began_[parity(step - 1)] - step_began_[parity(step)];
  const auto shift = [&](double by) {
    for (Span& span : before) span = {span.start + by, span.finish + by};
  };
  shift(earlier);
  stalls_ = stall_finder_->find(part, &before);
  shift(-earlier);
}

std::vector<Span> Executor::spans_before() const {
  if (!is_after_another(last_step()) || !timed()) return {};
  std::vector<Span> before = spans_[parity(last_step() - 1)];
  const double earlier = step_began_[parity(last_step() - 1)] - step_began_[parity(last_step())];
  for (Span& span : before) span = {span.start + earlier, span.finish + earlier};
  return before;
}

void Executor::run_poisoned() {
  constexpr int kPoison = 0xFF;  // a NaN in every floating-point type
  std::vector<std::vector<int32_t>> ends(steps_.size());
  const auto poison = [&](const Buffer& buffer) {
    if (buffer.tier != Tier::nvme)
      std::memset(storage_.transient(buffer.tier) + buffer.offset, kPoison, size_t(buffer.bytes));
  };
  for (int32_t b = 0; b < int32_t(plan_.buffers.size()); ++b) {
    const Buffer& buffer = plan_.buffers[b];
    if (size_t(buffer.last) + 1 < steps_.size()) ends[buffer.last].push_back(b);
  }
  for (Held& held : held_) held.values.fill(*held.from);
  for (int32_t i = 0; i < int32_t(steps_.size()); ++i) {
    run_op(i, last_step());
    for (int32_t b : ends[i]) poison(plan_.buffers[b]);
  }
}

void Executor::trace() {
  if (timed() || steps_.empty()) return;
  drain();  // of the steps so far nobody knows when ops ran
  for (std::vector<Span>& spans : spans_) spans.resize(steps_.size());
  for (Step& step : steps_)
    if (in_queue(step.stream)) step.begun = make_events(true), step.finished = make_events(true);
}

std::string Executor::first_non_finite() {
  if (device_) return "";  // its memory is not the host's to look at
  for (size_t t = 0; t < program_.tensors.size(); ++t)
    if (program_.tensors[t].persistent && program_.tensors[t].home != Tier::nvme &&
        !finite(program_.tensors[t], pointers_[t]))
      return program_.tensors[t].name;
  for (Held& held : held_) held.values.fill(*held.from);
  for (int32_t i = 0; i < int32_t(steps_.size()); ++i) {
    if (program_.ops[i].step_part == StepPart::update) continue;
    if (is_exchange(program_.ops[i].stream)) return "";  // other ranks do not come along
    steps_[i].launch();
    for (TensorId id : program_.ops[i].outputs)
      if (program_[id].home != Tier::nvme && !finite(program_[id], pointer(id))) return program_[id].name;
  }
  return "";
}

}  // namespace strata
