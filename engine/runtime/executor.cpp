// Binding and running; see executor.h.
#include "engine/runtime/executor.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <chrono>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "engine/planning/dependencies.h"
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

struct Executor::Step {
  Launch launch;
  std::vector<Wait> waits;
  std::vector<TensorId> watched;
  Stream stream;
  int32_t position = 0;           // among the ops of its stream
  int event = -1;                 // of the device, recorded after this op; -1: nobody waits for it
  int begun = -1, finished = -1;  // timed events around it, when spans are wanted
  volatile uint64_t* fault = nullptr;
  int run = -1;         // of ops that this one begins
  bool inside = false;  // … or is in, further on
};

// Ops of the compute stream that become one graph: nothing waits for anything between them.
struct Executor::Run {
  std::vector<int32_t> ops;
  int graph = -1;
};

// Progress of each stream in this step, and the threads of the streams beside compute.
struct Executor::Streams {
  std::array<std::vector<int32_t>, kStreams> ops;
  int graph = -1;          // the whole step as a graph of the device, once there is one
  std::vector<Run> runs;   // of a program that waits for the host
  bool has_graph = false;  // the program may become one
  int start = -1;          // event at the start of a step
  int64_t steps = 0;       // run so far
  std::array<std::atomic<int32_t>, kStreams> done{};
  std::atomic<int64_t> started{0};
  std::atomic<int> running{0};
  std::atomic<bool> failed{false}, stop{false};
  std::exception_ptr error;
  std::mutex error_mutex;
  std::vector<std::thread> threads;
  Threads alone{1};  // a team of one has no state: the streams that move bytes share it
  std::unique_ptr<Threads> host;

  void fail(std::exception_ptr what) {
    {
      std::lock_guard lock(error_mutex);
      if (!error) error = what;
    }
    failed = true;
    for (int s = 0; s < kStreams; ++s) release(s);
  }
  // Wakes whoever waits for a stream that will not go on.
  void release(int stream) {
    done[stream] = INT32_MAX;
    done[stream].notify_all();
  }
};

void Executor::copy_addends(Step& step, const OpView& view, const std::vector<void*>& outputs, Threads& threads,
                            const std::string& backend) {
  std::vector<std::tuple<void*, const void*, size_t>> copies;
  for (int o = 0; o < view.outputs(); ++o)
    if (view.accumulates(o) && pointers_[view.addend(o).value] != outputs[size_t(o)])
      copies.push_back({outputs[size_t(o)], pointers_[view.addend(o).value], size_t(view.output(o).bytes())});
  if (copies.empty()) return;
  if (in_queue(view.op().stream)) {  // by the device's own kernel of `move`, in the op's queue
    static const OpKind& kind = find_kind("move");
    std::vector<Launch> launches;
    for (int o = 0; o < view.outputs(); ++o)
      if (const TensorId addend = view.addend(o); addend && pointers_[addend.value] != outputs[size_t(o)]) {
        const Op copy{.kind = &kind, .inputs = {addend}, .outputs = {view.op().outputs[size_t(o)]}};
        launches.push_back(kind.kernels.find(backend)->second.bind(
            Binding(OpView(program_, copy), {pointers_[addend.value]}, {outputs[size_t(o)]}, nullptr, threads, nullptr,
                    device_->queue(view.op().stream))));
      }
    step.launch = [launches, launch = std::move(step.launch)] {
      for (const Launch& copy : launches) copy();
      launch();
    };
    return;
  }
  step.launch = [copies, &threads, launch = std::move(step.launch)] {
    for (const auto& [to, from, bytes] : copies)
      threads.split(int64_t(bytes), 1 << 16, [&, to = to, from = from](int64_t begin, int64_t end) {
        std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, size_t(end - begin));
      });
    launch();
  };
}

Executor::Executor(const Program& program, const MemoryPlan& plan, Storage& storage, const std::string& backend,
                   Threads& compute, int host_threads, const Groups* groups)
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
    streams_->host = std::make_unique<Threads>(host_threads);
  for (size_t t = 0; t < program.tensors.size(); ++t) {
    if (program.tensors[t].persistent) {
      pointers_[t] = storage.persistent(program.tensors[t].name);
      STRATA_CHECK(pointers_[t] || program.tensors[t].part_of);
    } else if (device_ && (program.tensors[t].role == Role::data || program.tensors[t].step_output)) {
      pointers_[t] = storage.shared_memory(program.tensors[t].bytes());  // the host writes or reads it
    } else if (plan.buffer_of[t] >= 0) {
      const Buffer& buffer = plan.buffers[plan.buffer_of[t]];
      if (buffer.tier == Tier::nvme) {
        slots_.push_back(storage.transient_slot(program.tensors[t], buffer.offset));
        pointers_[t] = slots_.back().get();
      } else {
        pointers_[t] = storage.transient(buffer.tier) + buffer.offset + program.tensors[t].part_offset;
      }
    }
  }
  if (device_) find_sent();
  const auto workspace = [&](int32_t i) -> std::byte* {
    const int32_t w = plan.workspace_of[i];
    return w < 0 ? nullptr : storage.transient(plan.buffers[w].tier) + plan.buffers[w].offset;
  };
  auto waits = plan_waits(program, plan);

  const auto may_fault = [&](const Op& op) {
    const auto kernel = op.kind->kernels.find(backend_of(op, backend));
    return in_queue(op.stream) && kernel != op.kind->kernels.end() && kernel->second.fault;
  };
  const int64_t faults = std::count_if(program.ops.begin(), program.ops.end(), may_fault);
  auto* next_fault = faults > 0 ? reinterpret_cast<uint64_t*>(storage.shared_memory(faults * 8)) : nullptr;

  stage_span_.assign(6, {-1, -1});
  steps_.resize(program.ops.size());
  for (int32_t i = 0; i < int32_t(program.ops.size()); ++i) {
    const Op& op = program.ops[i];
    const OpView view(program, op);
    std::vector<void*> inputs, outputs;
    for (TensorId id : op.inputs) inputs.push_back(id ? pointers_[id.value] : nullptr);
    for (const Sent& sent : sent_)
      for (size_t k = 0; k < inputs.size() && in_queue(op.stream); ++k)
        if (op.inputs[k] == sent.tensor) inputs[k] = sent.to;
    for (TensorId id : op.outputs) outputs.push_back(pointers_[id.value]);
    const auto kernel = op.kind->kernels.find(backend_of(op, backend));
    STRATA_CHECK(kernel != op.kind->kernels.end());
    Threads& threads = op.stream == Stream::compute ? compute
                       : op.stream == Stream::host  ? *streams_->host
                                                    : streams_->alone;
    Step& step = steps_[i];
    Communicator* group = nullptr;
    if (op.stream == Stream::exchange && op.attributes.has("axis")) {
      STRATA_CHECK(groups && groups->contains(op.attributes.string("axis")));
      group = groups->find(op.attributes.string("axis"))->second.get();
    }
    void* const queue = in_queue(op.stream) ? device_->queue(op.stream) : nullptr;
    uint64_t* const fault = queue && kernel->second.fault ? next_fault++ : nullptr;
    step.launch = kernel->second.bind(Binding(view, inputs, outputs, workspace(i), threads, group, queue, fault));
    step.fault = fault;
    copy_addends(step, view, outputs, threads, backend);  // where an addend could not share its output's memory
    step.waits = std::move(waits[i]);
    step.stream = op.stream;
    step.position = int32_t(streams_->ops[int(op.stream)].size());
    for (TensorId id : op.outputs)
      if (is_watched(program, id)) step.watched.push_back(id);
    streams_->ops[int(op.stream)].push_back(i);
    if (op.stream == Stream::compute) {
      auto& [first, last] = stage_span_[int(op.stage)];
      if (first < 0) first = i;
      last = i;
    }
  }
  if (device_) {
    streams_->has_graph = true;
    for (const Step& step : steps_) {
      streams_->has_graph &= in_queue(step.stream);
      for (const Wait& wait : step.waits)
        if (in_queue(wait.stream)) {
          int& event = steps_[size_t(streams_->ops[int(wait.stream)][size_t(wait.count) - 1])].event;
          if (event < 0) event = device_->make_event();
        }
    }
    for (int s = 1; s < kStreams; ++s)  // the end of each queue, for the compute queue to wait for
      if (in_queue(Stream(s)) && !streams_->ops[s].empty())
        if (int& event = steps_[size_t(streams_->ops[s].back())].event; event < 0) event = device_->make_event();
    streams_->start = device_->make_event(true);
    if (!streams_->has_graph) find_runs();
  }
  for (int s = 1; s < kStreams; ++s)
    if (!streams_->ops[s].empty() && !in_queue(Stream(s)))
      streams_->threads.emplace_back([this, s] {
        int64_t round = 0;
        for (;;) {
          streams_->started.wait(round);
          round = streams_->started.load();
          if (streams_->stop) return;
          run_stream(s, nullptr);
          if (streams_->running.fetch_sub(1) == 1) streams_->running.notify_all();
        }
      });
}

Executor::~Executor() {
  streams_->stop = true;
  ++streams_->started;
  streams_->started.notify_all();
  for (std::thread& thread : streams_->threads) thread.join();
}

void Executor::find_sent() {
  std::vector<bool> written(program_.tensors.size(), false);
  for (const Op& op : program_.ops)
    for (TensorId id : op.outputs) written[size_t(program_.whole(id).value)] = true;
  for (size_t t = 0; t < program_.tensors.size(); ++t) {
    const Tensor& tensor = program_.tensors[t];
    if (written[t]) continue;
    if (tensor.persistent && storage_.device_copy(tensor.name))
      sent_.push_back({{int32_t(t)}, storage_.device_copy(tensor.name)});
    else if (tensor.role == Role::data && plan_.buffer_of[t] >= 0)
      sent_.push_back({{int32_t(t)}, storage_.transient(Tier::device) + plan_.buffers[plan_.buffer_of[t]].offset});
  }
}

void Executor::find_runs() {
  constexpr size_t kShortest = 4;
  Run run;
  const auto close = [&] {
    if (run.ops.size() >= kShortest) {
      steps_[size_t(run.ops.front())].run = int(streams_->runs.size());
      for (size_t k = 1; k < run.ops.size(); ++k) steps_[size_t(run.ops[k])].inside = true;
      streams_->runs.push_back(run);
    }
    run.ops.clear();
  };
  for (int32_t i : streams_->ops[int(Stream::compute)]) {
    const Step& step = steps_[size_t(i)];
    const bool waits = std::any_of(step.waits.begin(), step.waits.end(),
                                   [](const Wait& wait) { return wait.stream != Stream::compute; });
    if (waits || (!run.ops.empty() && program_.ops[size_t(run.ops.back())].stage != program_.ops[size_t(i)].stage))
      close();
    run.ops.push_back(i);
    if (step.event >= 0) close();
  }
  close();
}

bool exchanges_in_queue(const Groups& groups) {
  return std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group.second->asynchronous(); });
}

bool Executor::in_queue(Stream stream) const {
  return device_ && (on_device(stream) || (stream == Stream::exchange && exchanges_in_queue_));
}

// Looks after the groups whose operations are under way: one that waits for a rank that is gone would wait for ever.
void Executor::wait_for_device() {
  if (exchanges_in_queue_) try {
      while (!device_->idle()) {
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

double Executor::now() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count() - step_began_;
}

void Executor::run_op(int32_t index) {
  Step& step = steps_[index];
  const bool restoring = program_.ops[index].purpose == Purpose::restore && step.stream == Stream::compute;
  const bool exchange = step.stream == Stream::exchange;
  const bool timed = restoring || exchange || !spans_.empty();
  const double start = timed ? now() : 0;
  try {
    step.launch();
  } catch (const Error& error) {
    throw Error("op " + std::to_string(index) + " (" + program_.ops[index].kind->name + "): " + error.what(),
                error.code());
  } catch (const std::exception& error) {
    throw Error("op " + std::to_string(index) + " (" + program_.ops[index].kind->name + "): " + error.what(),
                ExitCode::failed);
  }
  if (timed && !in_queue(step.stream)) {
    const double finish = now();
    if (restoring) stalls_.restoring += finish - start;
    if (exchange) stalls_.exchanging += finish - start;
    if (!spans_.empty()) spans_[size_t(index)] = {start, finish};
  }
  if (in_queue(step.stream)) return;
  for (TensorId id : step.watched)
    if (!finite(program_[id], pointer(id))) throw NonFinite(program_[id].name);
}

void Executor::run_stream(int stream, const StageHook* hook) {
  Streams& streams = *streams_;
  try {
    int32_t finished = 0;
    for (int32_t i : streams.ops[stream]) {
      for (const Wait& wait : steps_[i].waits) {
        auto& done = streams.done[int(wait.stream)];
        int32_t count = done.load(std::memory_order_acquire);
        if (count >= wait.count) continue;
        const double start = now();
        for (; count < wait.count; count = done.load(std::memory_order_acquire)) done.wait(count);
        if (stream == int(Stream::compute)) stalls_.waited[int(wait.stream)] += now() - start;
      }
      if (device_)
        for (const Wait& wait : steps_[i].waits)
          if (in_queue(wait.stream))
            device_->synchronize(steps_[size_t(streams.ops[int(wait.stream)][size_t(wait.count) - 1])].event);
      if (streams.failed.load(std::memory_order_acquire)) {
        streams.release(stream);
        return;
      }
      const auto& [first, last] = stage_span_[int(program_.ops[i].stage)];
      if (hook && i == first) (*hook)(program_.ops[i].stage, true);
      run_op(i);
      if (hook && i == last) (*hook)(program_.ops[i].stage, false);
      streams.done[stream].store(++finished, std::memory_order_release);
      if (!streams.threads.empty()) streams.done[stream].notify_all();
    }
  } catch (...) {
    streams.fail(std::current_exception());
  }
}

// An op, or the run that it begins.
void Executor::put_into_queue(int32_t index, Run* run) {
  Step& step = steps_[index];
  for (const Wait& wait : step.waits)
    if (in_queue(wait.stream) && wait.stream != step.stream)
      device_->wait(step.stream, steps_[size_t(streams_->ops[int(wait.stream)][size_t(wait.count) - 1])].event);
  if (step.begun >= 0) device_->record(step.begun, step.stream);
  if (!run) {
    run_op(index);
  } else {
    if (run->graph < 0) {
      device_->begin_capture();
      for (int32_t i : run->ops) run_op(i);
      run->graph = device_->end_capture();
    }
    device_->run_graph(run->graph);
  }
  if (step.finished >= 0) device_->record(step.finished, step.stream);
  const Step& last = run ? steps_[size_t(run->ops.back())] : step;
  if (last.event >= 0) device_->record(last.event, last.stream);
}

// Ops of the device in the order of the program; those of the host run on their threads meanwhile.
void Executor::run_on_device(const StageHook* hook) {
  Streams& streams = *streams_;
  const bool graphs = graphs_ && streams.steps > 0 && spans_.empty(), by_runs = graphs && !streams.has_graph;
  const auto queue_all = [&] {
    for (const Sent& sent : sent_)
      device_->copy(sent.to, pointer(sent.tensor), program_[sent.tensor].bytes(), Stream::compute);
    device_->record(streams.start, Stream::compute);
    device_began_ = now();
    for (int s = 1; s < kStreams; ++s)
      if (in_queue(Stream(s)) && !streams.ops[s].empty()) device_->wait(Stream(s), streams.start);
    for (int32_t i = 0; i < int32_t(steps_.size()); ++i) {
      Step& step = steps_[size_t(i)];
      if (!in_queue(step.stream) || (by_runs && step.inside)) continue;
      Run* const run = by_runs && step.run >= 0 ? &streams.runs[size_t(step.run)] : nullptr;
      const int32_t end = run ? run->ops.back() : i;
      for (const Wait& wait : step.waits) {
        if (in_queue(wait.stream)) continue;
        auto& done = streams.done[int(wait.stream)];
        const double start = now();
        for (int32_t count; (count = done.load(std::memory_order_acquire)) < wait.count;) done.wait(count);
        stalls_.waited[int(wait.stream)] += now() - start;
      }
      if (streams.failed.load(std::memory_order_acquire)) break;
      const auto& [first, last] = stage_span_[int(program_.ops[size_t(i)].stage)];
      if (hook && i == first) (*hook)(program_.ops[size_t(i)].stage, true);
      put_into_queue(i, run);
      if (hook && end == last) (*hook)(program_.ops[size_t(i)].stage, false);
      streams.done[int(step.stream)].store(steps_[size_t(end)].position + 1, std::memory_order_release);
      if (!streams.threads.empty()) streams.done[int(step.stream)].notify_all();
    }
    for (int s = 1; s < kStreams; ++s)
      if (in_queue(Stream(s)) && !streams.ops[s].empty())
        device_->wait(Stream::compute, steps_[size_t(streams.ops[s].back())].event);
  };
  try {
    if (graphs && streams.graph >= 0) {
      for (int s = 0; hook && s < int(stage_span_.size()); ++s)
        if (stage_span_[size_t(s)].first >= 0) (*hook)(Stage(s), true), (*hook)(Stage(s), false);
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
}

void Executor::run(const StageHook& hook) {
  Streams& streams = *streams_;
  streams.failed = false;
  streams.error = nullptr;
  stalls_ = {};
  step_began_ = 0;
  step_began_ = now();
  for (auto& count : streams.done) count.store(0, std::memory_order_relaxed);
  streams.running = int(streams.threads.size());
  if (!streams.threads.empty()) {
    ++streams.started;
    streams.started.notify_all();
  }
  if (device_)
    run_on_device(hook ? &hook : nullptr);
  else
    run_stream(0, hook ? &hook : nullptr);
  for (int s = 1; s < kStreams && !streams.threads.empty(); ++s) {  // what is left when nothing is left to compute
    if (in_queue(Stream(s))) continue;
    const auto count = int32_t(streams.ops[s].size());
    const double start = now();
    for (int32_t done; (done = streams.done[s].load(std::memory_order_acquire)) < count && !streams.failed;)
      streams.done[s].wait(done);
    stalls_.waited[s] += now() - start;
  }
  for (int left = streams.running; left > 0; left = streams.running) streams.running.wait(left);
  if (device_) {
    try {
      wait_for_device();
      if (!spans_.empty()) read_spans();
    } catch (...) {
      if (!streams.error) streams.fail(std::current_exception());
    }
    for (size_t i = 0; i < steps_.size(); ++i)
      if (Step& step = steps_[i]; step.fault && *step.fault != 0 && !streams.error) {
        const OpView view(program_, program_.ops[i]);
        const std::string what = view.op().kind->kernels.find(backend_)->second.fault(view, *step.fault);
        streams.fail(std::make_exception_ptr(
            Error("op " + std::to_string(i) + " (" + view.op().kind->name + "): " + what, ExitCode::failed)));
      }
    for (const Step& step : steps_)
      for (TensorId id : step.watched)
        if (!streams.error && in_queue(step.stream) && !finite(program_[id], pointer(id)))
          streams.fail(std::make_exception_ptr(NonFinite(program_[id].name)));
  }
  if (streams.error) std::rethrow_exception(streams.error);
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
  for (int32_t i = 0; i < int32_t(steps_.size()); ++i) {
    run_op(i);
    for (int32_t b : ends[i]) poison(plan_.buffers[b]);
  }
}

void Executor::trace() {
  spans_.resize(steps_.size());
  for (Step& step : steps_)
    if (in_queue(step.stream) && step.begun < 0)
      step.begun = device_->make_event(true), step.finished = device_->make_event(true);
}

// When the device's ops ran, and what its compute stream waited for between two of them: the stream whose op ended
// last.
void Executor::read_spans() {
  for (size_t i = 0; i < steps_.size(); ++i)
    if (steps_[i].begun >= 0)
      spans_[i] = {device_began_ + device_->seconds_between(streams_->start, steps_[i].begun),
                   device_began_ + device_->seconds_between(streams_->start, steps_[i].finished)};
  stalls_ = {};
  double free = device_began_;
  for (size_t i = 0; i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    if (step.stream == Stream::exchange) stalls_.exchanging += spans_[i].finish - spans_[i].start;
    if (step.stream != Stream::compute) continue;
    if (program_.ops[i].purpose == Purpose::restore) stalls_.restoring += spans_[i].finish - spans_[i].start;
    double last = free;
    for (const Wait& wait : step.waits) {
      const double end = spans_[size_t(streams_->ops[int(wait.stream)][size_t(wait.count) - 1])].finish;
      if (end > last) stalls_.waited[int(wait.stream)] += end - last;
      last = std::max(last, end);
    }
    free = spans_[i].finish;
  }
}

std::string Executor::first_non_finite() {
  if (device_) return "";  // its memory is not the host's to look at
  for (size_t t = 0; t < program_.tensors.size(); ++t)
    if (program_.tensors[t].persistent && program_.tensors[t].home != Tier::nvme &&
        !finite(program_.tensors[t], pointers_[t]))
      return program_.tensors[t].name;
  for (int32_t i = 0; i < int32_t(steps_.size()); ++i) {
    if (program_.ops[i].stage == Stage::update) continue;
    if (program_.ops[i].stream == Stream::exchange) return "";  // other ranks do not come along
    steps_[i].launch();
    for (TensorId id : program_.ops[i].outputs)
      if (program_[id].home != Tier::nvme && !finite(program_[id], pointer(id))) return program_[id].name;
  }
  return "";
}

}  // namespace strata
