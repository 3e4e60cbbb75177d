// The CUDA device: memory, a stream for each stream of the program, events, graphs; see strata/device.h.
#include "strata/device.h"

#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/direct_storage.h"
#include "cuda/nccl.h"
#include "strata/error.h"

namespace strata::cuda {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void must(cudaError_t error, const std::string& what) {
  if (error != cudaSuccess) throw Error(what + ": " + cudaGetErrorString(error) + ".", ExitCode::failed);
}

class CudaDevice final : public Device {
 public:
  CudaDevice(int index, int local_rank) {
    int count = 0, driver = 0;
    cudaDriverGetVersion(&driver);
    const cudaError_t found = cudaGetDeviceCount(&count);
    if (found == cudaErrorInsufficientDriver && driver > 0)
      throw Error("the NVIDIA driver is for CUDA " + version_text(driver) + ", but this build needs CUDA " +
                  version_text(CUDART_VERSION) + "; install a newer driver.");
    if (found != cudaSuccess || count == 0)
      throw Error(std::string("no CUDA device: ") +
                  (driver == 0 ? "no NVIDIA driver is installed" : cudaGetErrorString(found)) +
                  "; set device.backend = \"cpu\" to train without one.");
    index_ = index >= 0 ? index : local_rank % count;
    if (index >= count)
      throw Error("device.index = " + std::to_string(index) + ", but this machine has " + std::to_string(count) +
                  " CUDA device(s), 0 to " + std::to_string(count - 1) + ".");
    must(cudaGetDeviceProperties(&properties_, index_), "cannot look at CUDA device " + std::to_string(index_));
    if (properties_.major < 8)
      throw Error(std::string(properties_.name) + " has compute capability " + std::to_string(properties_.major) + "." +
                  std::to_string(properties_.minor) + ", but this build has code for 8.0 and newer only.");
    use();
    must(cudaStreamCreateWithFlags(&own_, cudaStreamNonBlocking), "cannot make a CUDA stream");
    for (cudaStream_t& stream : streams_)
      must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cannot make a CUDA stream");
  }
  ~CudaDevice() override {
    cudaSetDevice(index_);
    for (cudaStream_t stream : streams_) cudaStreamSynchronize(stream);
    cudaStreamSynchronize(own_);
    for (cudaGraphExec_t graph : graphs_) cudaGraphExecDestroy(graph);
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
    cudaStreamDestroy(own_);
  }

  std::string describe() const override {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    return std::string(properties_.name) + " (device " + std::to_string(index_) + ", CUDA " +
           version_text(CUDART_VERSION) + ", driver for CUDA " + version_text(driver) + ")";
  }
  std::string identity() const override { return {properties_.uuid.bytes, sizeof properties_.uuid.bytes}; }
  int64_t free_bytes() const override {
    size_t free = 0, total = 0;
    must(cudaMemGetInfo(&free, &total), "cannot ask for the free memory of the CUDA device");
    return int64_t(free);
  }
  // Dense figures of NVIDIA's data sheets.
  double peak_flops(DType dtype) const override {
    struct Known {
      const char* name;
      double half, single;
    };
    static constexpr Known list[] = {{"H200", 989e12, 67e12}, {"H100", 989e12, 67e12}, {"A100", 312e12, 19.5e12}};
    for (const Known& known : list)
      if (std::string(properties_.name).find(known.name) != std::string::npos)
        return dtype == DType::f32 ? known.single : known.half;
    return 0;
  }

  void* allocate(Tier tier, int64_t bytes) override {
    void* memory = nullptr;
    if (bytes == 0) return memory;
    use();
    // What the disk is read into begins at a multiple of kPage; CUDA gives small pieces of one page.
    const cudaError_t error =
        tier == Tier::device
            ? cudaMalloc(&memory, size_t(bytes))
            : cudaHostAlloc(&memory, size_t(bytes) + kPage, cudaHostAllocPortable | cudaHostAllocMapped);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // it is not to show up again
      throw Error("the plan needs " + bytes_text(bytes) + " of " +
                  (tier == Tier::device
                       ? "memory of " + describe() + ", of which " + bytes_text(free_bytes()) + " is free"
                       : std::string("pinned host memory, which the system does not give")) +
                  "; lower device.memory or host.memory so that less is planned.");
    }
    must(error, "cannot allocate memory");
    if (tier == Tier::device) {
      must(cudaMemsetAsync(memory, 0, size_t(bytes), own_), "cannot clear memory");
      must(cudaStreamSynchronize(own_), "cannot clear memory");
      return memory;
    }
    void* const page = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage);
    const std::lock_guard lock(mutex_);
    pinned_[page] = memory;
    return page;
  }
  void release(Tier tier, void* memory) override {
    if (tier == Tier::device) {
      cudaFree(memory);
      return;
    }
    const std::lock_guard lock(mutex_);
    if (const auto found = pinned_.extract(memory)) cudaFreeHost(found.mapped());
  }
  void copy(void* to, const void* from, int64_t bytes) override {
    use();
    must(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDefault, own_), "cannot copy to or from the CUDA device");
    must(cudaStreamSynchronize(own_), "cannot copy to or from the CUDA device");
  }

  void copy_rows(void* to, int64_t to_step, const void* from, int64_t from_step, int64_t bytes, int64_t rows) override {
    use();
    must(cudaMemcpy2DAsync(to, size_t(to_step), from, size_t(from_step), size_t(bytes), size_t(rows),
                           cudaMemcpyDefault, own_),
         "cannot copy to or from the CUDA device");
    must(cudaStreamSynchronize(own_), "cannot copy to or from the CUDA device");
  }
  void copy(void* to, const void* from, int64_t bytes, Stream stream) override {
    must(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDefault, streams_[size_t(stream)]),
         "cannot copy to or from the CUDA device");
  }

  std::unique_ptr<DeviceFile> open_file(int file, void* memory, int64_t bytes) override {
    return open_direct(index_, file, memory, bytes);
  }

  void* queue(Stream stream) override { return streams_[size_t(stream)]; }
  void* queue() override { return own_; }
  int make_event(bool timed) override {
    events_.emplace_back();
    must(cudaEventCreateWithFlags(&events_.back(), timed ? cudaEventDefault : cudaEventDisableTiming),
         "cannot make a CUDA event");
    return int(events_.size()) - 1;
  }
  double seconds_between(int first, int second) const override {
    float milliseconds = 0;
    must(cudaEventElapsedTime(&milliseconds, events_[size_t(first)], events_[size_t(second)]),
         "cannot read CUDA events");
    return double(milliseconds) / 1000;
  }
  void record(int event, Stream stream) override {
    must(cudaEventRecord(events_[size_t(event)], streams_[size_t(stream)]), "cannot record a CUDA event");
  }
  void wait(Stream stream, int event) override {
    must(cudaStreamWaitEvent(streams_[size_t(stream)], events_[size_t(event)]), "cannot wait for a CUDA event");
  }
  bool reached(int event) override {
    use();
    const cudaError_t state = cudaEventQuery(events_[size_t(event)]);
    if (state == cudaErrorNotReady) return false;
    must(state, "a kernel failed");
    return true;
  }
  // Not the whole GPU: another rank of this process may be capturing a graph on it, which that would end.
  void synchronize() override {
    use();
    for (cudaStream_t stream : streams_) must(cudaStreamSynchronize(stream), "a kernel failed");
  }
  bool idle() override {
    for (cudaStream_t stream : streams_) {
      const cudaError_t state = cudaStreamQuery(stream);
      if (state == cudaErrorNotReady) return false;
      must(state, "a kernel failed");
    }
    return true;
  }
  std::unique_ptr<Communicator> group(World& world, const std::string& name, const std::vector<int>& members,
                                      Stream stream, double timeout_seconds) override {
    return nccl_group(world, name, members, index_, queue(stream), timeout_seconds);
  }

  // The compute stream is the graph's trunk; the others join through events.
  void begin_capture() override {
    must(cudaStreamBeginCapture(streams_[0], cudaStreamCaptureModeThreadLocal), "cannot begin a CUDA graph");
  }
  int end_capture() override {
    cudaGraph_t graph = nullptr;
    must(cudaStreamEndCapture(streams_[0], &graph), "cannot end a CUDA graph");
    graphs_.emplace_back();
    const cudaError_t error = cudaGraphInstantiate(&graphs_.back(), graph, 0);
    cudaGraphDestroy(graph);
    must(error, "cannot make a CUDA graph");
    return int(graphs_.size()) - 1;
  }
  void run_graph(int graph) override {
    must(cudaGraphLaunch(graphs_[size_t(graph)], streams_[0]), "cannot run a graph");
  }

 private:
  // A thread that has not said so works with device 0, and makes a context there.
  void use() const { must(cudaSetDevice(index_), "cannot use CUDA device " + std::to_string(index_)); }

  static constexpr uintptr_t kPage = 4096;  // bytes

  int index_;
  cudaDeviceProp properties_{};
  std::array<cudaStream_t, kStreams> streams_{};
  // Of what is over when a call returns, and of kernels that such copies come after. cudaMemcpy does not do: it returns
  // before what it has staged is on the device, and nothing else waits for that.
  cudaStream_t own_ = nullptr;
  std::vector<cudaEvent_t> events_;
  std::vector<cudaGraphExec_t> graphs_;
  std::mutex mutex_;
  std::map<void*, void*> pinned_;  // host memory, by where its first page begins
};

}  // namespace
}  // namespace strata::cuda

extern "C" __attribute__((visibility("default"))) const strata::DeviceEntry* strata_device_v1() {
  static const strata::DeviceEntry entry{
      sizeof(strata::DeviceEntry), STRATA_FINGERPRINT,
      [](int index, int local_rank) -> strata::Device* { return new strata::cuda::CudaDevice(index, local_rank); }};
  return &entry;
}
