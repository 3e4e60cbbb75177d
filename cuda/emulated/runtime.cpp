// CUDA's streams, events, graphs and memory on the host, for tests: see machine.h and cuda_runtime.h. One lock; whoever
// waits for a stream or an event runs what may run, of any stream, one piece of work at a time.
#include "cuda_runtime.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/emulated/machine.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Node {
  std::function<void()> work;
  std::function<bool()> ready;
  std::vector<int> after;  // nodes of a graph
};

}  // namespace

struct StrataEmulatedEvent {
  int64_t recorded = 0, done = 0;  // how often
  Clock::time_point at;
  StrataEmulatedGraph* capture = nullptr;  // the mark is in this graph
  std::vector<int> nodes;                  // … after these of its nodes
};

struct StrataEmulatedStream {
  int device = 0;
  std::deque<Node> queue;
  bool running = false;
  StrataEmulatedGraph* capture = nullptr;
  std::vector<int> last;  // nodes that what is captured next comes after
};

struct StrataEmulatedGraph {
  std::thread::id owner = std::this_thread::get_id();  // who may not call what would wait, while it is captured
  std::vector<Node> nodes;
  std::set<StrataEmulatedStream*> streams;
};

namespace {

struct Runtime {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<StrataEmulatedStream*> streams;
  std::map<void*, std::pair<size_t, int>> device_memory;  // bytes, device
  std::map<void*, std::pair<void*, size_t>> host_memory;  // its pages
  std::map<int, size_t> used;
  std::mt19937_64 random{1};
  int64_t graphs_run = 0;
  cudaError_t last = cudaSuccess;
  bool open = false;  // devices' memory can be touched

  static Runtime& get() {
    static Runtime& runtime = *new Runtime;
    return runtime;
  }

  // The memory of devices opens for as long as the emulator works.
  void touch(bool allow) {
    if (open == allow) return;
    open = allow;
    for (const auto& [memory, what] : device_memory)
      mprotect(memory, what.first, allow ? PROT_READ | PROT_WRITE : PROT_NONE);
  }

  bool run_one() {
    std::vector<StrataEmulatedStream*> may;
    for (StrataEmulatedStream* stream : streams)
      if (!stream->queue.empty() && !stream->running && (!stream->queue.front().ready || stream->queue.front().ready()))
        may.push_back(stream);
    if (may.empty()) return false;
    StrataEmulatedStream* const stream = may[random() % may.size()];
    const Node node = std::move(stream->queue.front());
    stream->queue.pop_front();
    touch(true);
    if (node.work) node.work();
    changed.notify_all();
    return true;
  }

  // Whoever only looks does not wait until a queue is empty: something happens meanwhile, or nothing.
  bool goes_on() { return random() % 16 != 0; }

  template <class Until>
  void wait(std::unique_lock<std::mutex>& lock, Until&& until) {
    while (!until())
      if (!run_one()) {
        touch(false);
        changed.wait_for(lock, std::chrono::milliseconds(50));
      }
    touch(false);
  }

  void put(StrataEmulatedStream* stream, Node node) {
    if (StrataEmulatedGraph* const graph = stream->capture) {
      node.after = stream->last;
      graph->nodes.push_back(std::move(node));
      stream->last = {int(graph->nodes.size()) - 1};
    } else {
      stream->queue.push_back(std::move(node));
      changed.notify_all();
    }
  }
  bool capturing() const {
    return std::any_of(streams.begin(), streams.end(),
                       [](const auto* s) { return s->capture && s->capture->owner == std::this_thread::get_id(); });
  }
  cudaError_t give(cudaError_t error) {
    if (error != cudaSuccess) last = error;
    return error;
  }
  static thread_local int current;
};
thread_local int Runtime::current = 0;

// Runs a graph's nodes one a call, in an order that its edges allow.
struct GraphRun {
  std::vector<Node> nodes;
  std::vector<bool> done;
  size_t left;
  explicit GraphRun(std::vector<Node> list) : nodes(std::move(list)), done(nodes.size()), left(nodes.size()) {}
  std::vector<size_t> may() const {
    std::vector<size_t> result;
    for (size_t i = 0; i < nodes.size(); ++i)
      if (!done[i] &&
          std::all_of(nodes[i].after.begin(), nodes[i].after.end(), [&](int n) { return done[size_t(n)]; }) &&
          (!nodes[i].ready || nodes[i].ready()))
        result.push_back(i);
    return result;
  }
};

size_t pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

}  // namespace

namespace strata::cuda {

Machine& machine() {
  static Machine machine;
  return machine;
}

void shuffle_streams(uint64_t seed) {
  Runtime& runtime = Runtime::get();
  const std::lock_guard lock(runtime.mutex);
  runtime.random.seed(seed);
}

int64_t graphs_run() {
  Runtime& runtime = Runtime::get();
  const std::lock_guard lock(runtime.mutex);
  return std::exchange(runtime.graphs_run, 0);
}

void enqueue(void* stream, std::function<void()> work, std::function<bool()> ready) {
  Runtime& runtime = Runtime::get();
  const std::lock_guard lock(runtime.mutex);  // there is one emulator, so what needs no stream has its turn too
  if (!stream) {
    runtime.touch(true);
    work();
    return runtime.touch(false);
  }
  runtime.put(static_cast<cudaStream_t>(stream), {std::move(work), std::move(ready), {}});
}

void look_again() { Runtime::get().changed.notify_all(); }
void change(const std::function<void()>& how) {
  const std::lock_guard lock(Runtime::get().mutex);
  how();
  look_again();
}

}  // namespace strata::cuda

#define STRATA_LOCKED()              \
  Runtime& runtime = Runtime::get(); \
  std::unique_lock lock(runtime.mutex)

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInsufficientDriver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureUnjoined:
      return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case cudaErrorCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
  }
  return "unknown error";
}
cudaError_t cudaGetLastError() {
  STRATA_LOCKED();
  return std::exchange(runtime.last, cudaSuccess);
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = strata::cuda::machine().driver;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  const strata::cuda::Machine& machine = strata::cuda::machine();
  *count = machine.devices;
  if (machine.driver < CUDART_VERSION / 1000 * 1000) return cudaErrorInsufficientDriver;
  return machine.devices == 0 ? cudaErrorNoDevice : cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  const strata::cuda::Machine& machine = strata::cuda::machine();
  if (device < 0 || device >= machine.devices) return cudaErrorInvalidDevice;
  *properties = {};
  std::strncpy(properties->name, machine.name, sizeof properties->name - 1);
  properties->major = machine.major, properties->minor = machine.minor;
  std::snprintf(properties->uuid.bytes, sizeof properties->uuid.bytes, "emulated %d", device);
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= strata::cuda::machine().devices) return cudaErrorInvalidDevice;
  Runtime::current = device;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  STRATA_LOCKED();
  *total = strata::cuda::machine().memory;
  *free = *total - runtime.used[Runtime::current];
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  STRATA_LOCKED();
  if (runtime.capturing()) return runtime.give(cudaErrorStreamCaptureUnsupported);
  size_t& used = runtime.used[Runtime::current];
  if (used + pages(bytes) > strata::cuda::machine().memory) return runtime.give(cudaErrorMemoryAllocation);
  *memory = mmap(nullptr, pages(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*memory == MAP_FAILED) return runtime.give(cudaErrorMemoryAllocation);
  runtime.device_memory[*memory] = {pages(bytes), Runtime::current};
  used += pages(bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  STRATA_LOCKED();
  const auto found = runtime.device_memory.find(memory);
  if (found == runtime.device_memory.end()) return memory ? cudaErrorInvalidValue : cudaSuccess;
  munmap(memory, found->second.first);
  runtime.used[found->second.second] -= found->second.first;
  runtime.device_memory.erase(found);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  STRATA_LOCKED();
  constexpr size_t kInPage = 512;  // where small pieces begin on a GPU, too
  void* const base =
      mmap(nullptr, pages(bytes + kInPage), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return runtime.give(cudaErrorMemoryAllocation);
  *memory = static_cast<char*>(base) + kInPage;
  runtime.host_memory[*memory] = {base, pages(bytes + kInPage)};
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  STRATA_LOCKED();
  const auto found = runtime.host_memory.find(memory);
  if (found == runtime.host_memory.end()) return cudaErrorInvalidValue;
  munmap(found->second.first, found->second.second);
  runtime.host_memory.erase(found);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  strata::cuda::enqueue(stream, [=] { std::memset(memory, value, bytes); });
  return cudaSuccess;
}
bool strata::cuda::copy_now(void* to, const void* from, size_t bytes) {
  STRATA_LOCKED();
  if (runtime.capturing()) return false;
  runtime.touch(true);
  std::memcpy(to, from, bytes);
  runtime.touch(false);
  return true;
}
namespace {
void copy_2d(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height) {
  for (size_t row = 0; row < height; ++row)
    std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
}
}  // namespace
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  if (width > to_pitch || width > from_pitch) return cudaErrorInvalidValue;
  strata::cuda::enqueue(stream, [=] { copy_2d(to, to_pitch, from, from_pitch, width, height); });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  strata::cuda::enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  STRATA_LOCKED();
  *stream = new StrataEmulatedStream;
  (*stream)->device = Runtime::current;
  runtime.streams.push_back(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  STRATA_LOCKED();
  std::erase(runtime.streams, stream);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  STRATA_LOCKED();
  if (stream->capture) return runtime.give(cudaErrorStreamCaptureUnsupported);
  runtime.wait(lock, [&] { return stream->queue.empty(); });
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  STRATA_LOCKED();
  if (stream->capture) return runtime.give(cudaErrorStreamCaptureUnsupported);
  while (!stream->queue.empty() && runtime.goes_on() && runtime.run_one()) {
  }
  runtime.touch(false);
  return stream->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  STRATA_LOCKED();
  if (event->capture) {
    if (stream->capture && stream->capture != event->capture) return runtime.give(cudaErrorStreamCaptureIsolation);
    if (!stream->capture) {
      if (!stream->queue.empty()) return runtime.give(cudaErrorStreamCaptureIsolation);
      stream->capture = event->capture;
      stream->capture->streams.insert(stream);
      stream->last.clear();
    }
    stream->last.insert(stream->last.end(), event->nodes.begin(), event->nodes.end());
    return cudaSuccess;
  }
  if (stream->capture) return runtime.give(cudaErrorStreamCaptureIsolation);
  runtime.put(stream, {{}, [event, count = event->recorded] { return event->done >= count; }, {}});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new StrataEmulatedEvent;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  STRATA_LOCKED();
  if (stream->capture) {
    event->capture = stream->capture;
    event->nodes = stream->last;
    return cudaSuccess;
  }
  event->capture = nullptr;
  ++event->recorded;
  runtime.put(stream, {[event, count = event->recorded] {
                         event->done = std::max(event->done, count);
                         event->at = Clock::now();
                       },
                       {},
                       {}});
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  STRATA_LOCKED();
  if (event->capture) return runtime.give(cudaErrorCapturedEvent);
  runtime.wait(lock, [&, count = event->recorded] { return event->done >= count; });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  STRATA_LOCKED();
  if (event->capture) return runtime.give(cudaErrorCapturedEvent);
  while (event->done < event->recorded && runtime.goes_on() && runtime.run_one()) {
  }
  runtime.touch(false);
  return event->done >= event->recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  STRATA_LOCKED();
  if (start->done < start->recorded || end->done < end->recorded) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(end->at - start->at).count();
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  STRATA_LOCKED();
  if (stream->capture) return runtime.give(cudaErrorStreamCaptureUnsupported);
  stream->capture = new StrataEmulatedGraph;
  stream->capture->streams.insert(stream);
  stream->last.clear();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  STRATA_LOCKED();
  StrataEmulatedGraph* const made = stream->capture;
  if (!made) return runtime.give(cudaErrorInvalidValue);
  std::vector<bool> joined(made->nodes.size());
  std::vector<int> left = stream->last;
  while (!left.empty()) {
    const int node = left.back();
    left.pop_back();
    if (joined[size_t(node)]) continue;
    joined[size_t(node)] = true;
    left.insert(left.end(), made->nodes[size_t(node)].after.begin(), made->nodes[size_t(node)].after.end());
  }
  for (StrataEmulatedStream* s : made->streams) s->capture = nullptr, s->last.clear();
  *graph = made;
  const bool all = std::all_of(joined.begin(), joined.end(), [](bool j) { return j; });
  return all ? cudaSuccess : runtime.give(cudaErrorStreamCaptureUnjoined);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* ready, cudaGraph_t graph, unsigned long long) {
  *ready = new StrataEmulatedGraph(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  STRATA_LOCKED();
  if (stream->capture) return runtime.give(cudaErrorStreamCaptureUnsupported);
  ++runtime.graphs_run;
  const auto run = std::make_shared<GraphRun>(graph->nodes);
  for (size_t i = 0; i < graph->nodes.size(); ++i)  // one piece of work a node, each the next that may run
    stream->queue.push_back({[run, &runtime] {
                               const std::vector<size_t> may = run->may();
                               const size_t node = may[runtime.random() % may.size()];
                               if (run->nodes[node].work) run->nodes[node].work();
                               run->done[node] = true;
                             },
                             [run] { return !run->may().empty(); },
                             {}});
  runtime.changed.notify_all();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return cudaSuccess;
}
