// Binding and running; see executor.h.
#include "engine/runtime/executor.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
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

// With a copy before, where an addend could not share its output's memory.
Launch Executor::with_addends(Launch launch, const OpView& view, const std::vector<void*>& outputs,
                              Threads& threads) const {
  std::vector<std::tuple<void*, const void*, size_t>> copies;
  for (int o = 0; o < view.outputs(); ++o)
    if (view.accumulates(o) && pointers_[view.addend(o).value] != outputs[size_t(o)])
      copies.push_back({outputs[size_t(o)], pointers_[view.addend(o).value], size_t(view.output(o).bytes())});
  if (copies.empty()) return launch;
  if (in_queue(view.op().stream)) {  // by the device's own kernel of `move`, in the op's queue
    static const OpKind& kind = find_kind("move");
    std::vector<Launch> launches;
    for (int o = 0; o < view.outputs(); ++o)
      if (const TensorId addend = view.addend(o); addend && pointers_[addend.value] != outputs[size_t(o)]) {
        const Op copy{.kind = &kind, .inputs = {addend}, .outputs = {view.op().outputs[size_t(o)]}};
        launches.push_back(kind.kernels.find(backend_)->second.bind(
            Binding(OpView(program_, copy), {pointers_[addend.value]}, {outputs[size_t(o)]}, nullptr, threads, nullptr,
                    device_->queue(view.op().stream))));
      }
    return [launches, launch = std::move(launch)] {
      for (const Launch& copy : launches) copy();
      launch();
    };
  }
  return [copies, &threads, launch = std::move(launch)] {
    for (const auto& [to, from, bytes] : copies)
      threads.split(int64_t(bytes), 1 << 16, [&, to = to, from = from](int64_t begin, int64_t end) {
        std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, size_t(end - begin));
      });
    launch();
  };
}

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

void Executor::place_tensors() {
  for (size_t t = 0; t < program_.tensors.size(); ++t) {
    const Tensor& tensor = program_.tensors[t];
    if (tensor.persistent) {
      const Tensor& whole = program_[program_.whole({int32_t(t)})];  // parts may be other programs' own
      pointers_[t] = storage_.persistent(whole.name.text());
      STRATA_CHECK(pointers_[t]);
      if (tensor.part_of && whole.home == Tier::nvme) {
        slots_.push_back(storage_.part_slot(tensor, plan_.persistent_offset.at(int32_t(t)) + tensor.part_offset));
        pointers_[t] = slots_.back().get();
      } else if (tensor.part_of) {
        pointers_[t] = static_cast<std::byte*>(pointers_[t]) + tensor.part_offset;
      }
    } else if (device_ && (tensor.role == Role::data || tensor.step_output)) {
      if (tensor.part_of)  // which came before
        pointers_[t] = static_cast<std::byte*>(pointers_[size_t(tensor.part_of.value)]) + tensor.part_offset;
      else
        pointers_[t] = storage_.shared_memory(tensor.bytes());  // the host writes or reads it
    } else if (plan_.buffer_of[t] >= 0) {
      const Buffer& buffer = plan_.buffers[size_t(plan_.buffer_of[t])];
      if (buffer.tier == Tier::nvme) {
        slots_.push_back(storage_.transient_slot(tensor, buffer.offset));
        pointers_[t] = slots_.back().get();
      } else {
        pointers_[t] = storage_.transient(buffer.tier) + buffer.offset + tensor.part_offset;
      }
    }
  }
}

const Kernel& Executor::kernel_of(const Op& op) const {
  const auto kernel = op.kind->kernels.find(backend_of(op, backend_));
  STRATA_CHECK(kernel != op.kind->kernels.end());
  return kernel->second;
}

// Places for what kernels that cannot throw leave, one for each of them; null when there are none.
uint64_t* Executor::make_faults() const {
  const auto may_fault = [&](const Op& op) { return in_queue(op.stream) && kernel_of(op).fault; };
  const int64_t faults = std::count_if(program_.ops.begin(), program_.ops.end(), may_fault);
  return faults > 0 ? reinterpret_cast<uint64_t*>(storage_.shared_memory(faults * 8)) : nullptr;
}

std::vector<void*> Executor::inputs_of(int32_t index, size_t parity) const {
  const Op& op = program_.ops[size_t(index)];
  std::vector<void*> inputs;
  for (TensorId id : op.inputs) inputs.push_back(id ? pointers_[size_t(id.value)] : nullptr);
  for (const Sent& sent : sent_)
    for (size_t k = 0; k < inputs.size() && in_queue(op.stream); ++k)
      if (op.inputs[k] == sent.tensor) inputs[k] = sent.to;
  if (reads_held(index))
    for (size_t k = 0; k < inputs.size(); ++k)
      if (Held* const held = op.inputs[k] ? held_of_[size_t(op.inputs[k].value)] : nullptr)
        inputs[k] = &held->values[parity];
  return inputs;
}

// What the host sets before a step is read in its place by ops that are over when it sets the next step's.
void Executor::hold_scalars() {
  if (awaited_ == counts_) return;
  held_of_.assign(program_.tensors.size(), nullptr);
  const std::vector<bool> is_set = set_by_host(program_);
  for (size_t t = 0; t < is_set.size(); ++t)
    if (is_set[t]) held_of_[t] = &held_.emplace_back(Held{static_cast<const double*>(pointers_[t]), {}});
}

bool Executor::reads_held(int32_t index) const {
  const Op& op = program_.ops[size_t(index)];
  return !held_of_.empty() && steps_[size_t(index)].position >= awaited_[size_t(op.stream)] &&
         std::any_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) { return id && held_of_[size_t(id.value)]; });
}

// Null where there is none: a kernel that asks for it says so.
Communicator* Executor::group_of(const Op& op) const {
  if (!is_exchange(op.stream) || !groups_) return nullptr;
  const auto found = groups_->find(strata::group_of(op, *groups_));
  return found == groups_->end() ? nullptr : found->second.get();
}

void Executor::bind_op(int32_t index, Threads& compute, uint64_t*& next_fault) {
  Step& step = steps_[size_t(index)];
  if (in_queue(step.stream) && kernel_of(program_.ops[size_t(index)]).fault) step.fault = next_fault++;
  step.launch = bind(index, 0, compute, const_cast<uint64_t*>(step.fault));
  if (reads_held(index)) step.odd = bind(index, 1, compute, nullptr);
}

Launch Executor::bind(int32_t index, size_t parity, Threads& compute, uint64_t* fault) {
  const Op& op = program_.ops[size_t(index)];
  const OpView view(program_, op);
  std::vector<void*> outputs;
  for (TensorId id : op.outputs) outputs.push_back(pointers_[size_t(id.value)]);
  const Kernel& kernel = kernel_of(op);
  Threads& threads = op.stream == Stream::compute ? compute
                     : op.stream == Stream::host  ? *streams_->host
                                                  : streams_->alone;
  const int32_t w = plan_.workspace_of[size_t(index)];
  std::byte* const workspace =
      w < 0 ? nullptr : storage_.transient(plan_.buffers[size_t(w)].tier) + plan_.buffers[size_t(w)].offset;
  if (kernel.workspace)
    STRATA_CHECK(kernel.workspace(view, threads.count()) <= (w < 0 ? 0 : plan_.buffers[size_t(w)].bytes));
  void* const queue = !device_ ? nullptr : in_queue(op.stream) ? device_->queue(op.stream) : device_->queue();
  try {
    Launch launch = with_addends(
        kernel.bind(Binding(view, inputs_of(index, parity), outputs, workspace, threads, group_of(op), queue, fault)),
        view, outputs, threads);
    if (op.purpose != Purpose::again) return launch;
    const double* const again = static_cast<const double*>(pointers_[size_t(program_.again_if.value)]);
    return [again, launch = std::move(launch)] {
      if (*again != 0) launch();
    };
  } catch (const Error& error) {
    throw Error("op " + std::to_string(index) + " (" + op.kind->name + "): " + error.what(), error.code());
  }
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

std::string pair_name(std::string_view axis, int from, int to) {
  return std::string(axis) + " " + std::to_string(from) + ">" + std::to_string(to);
}

std::string group_of(const Op& op, const Groups& groups) {
  if (!op.attributes.has("axis")) return "";
  const std::string axis = op.attributes.string("axis");
  const auto along = groups.find(axis);
  if ((op.stream != Stream::send && op.stream != Stream::receive) || along == groups.end()) return axis;
  const int size = along->second->size(), own = along->second->rank();
  const int other = int(((own + op.attributes.integer("offset")) % size + size) % size);
  return op.stream == Stream::send ? pair_name(axis, own, other) : pair_name(axis, other, own);
}

bool exchanges_in_queue(const Groups& groups) {
  return std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group.second->asynchronous(); });
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
