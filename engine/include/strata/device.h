// A device whose work is asynchronous: its memory, and queues that run ops beside the host. The backends cpu and
// reference have none; their kernels run on the threads of the executor. A device is a module of its own,
// lib/strata/devices/NAME.so, loaded only when a configuration asks for it; loading registers its kernels.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "strata/fingerprint.h"
#include "strata/program.h"

namespace strata {

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string describe() const = 0;    // "NVIDIA H200 (device 0, CUDA 13.0, driver 13.0)"
  virtual int64_t free_bytes() const = 0;      // of its memory, now
  virtual double peak_flops(DType) const = 0;  // dense, of matrix products; 0: not known

  // Tier::device: its own memory. Tier::host: pinned host memory, which it can read and write too. Zero at first.
  // Throws Error (failed) when there is not enough.
  virtual void* allocate(Tier tier, int64_t bytes) = 0;
  virtual void release(Tier tier, void* memory) = 0;
  virtual void copy(void* to, const void* from, int64_t bytes) = 0;  // either way or within; returns when done

  // The queue of a stream of the program, as kernels take it (Binding::queue).
  virtual void* queue(Stream stream) = 0;
  // Events: numbered marks in queues.
  virtual int make_event() = 0;
  virtual void record(int event, Stream stream) = 0;  // after what is in the queue now
  virtual void wait(Stream stream, int event) = 0;    // what comes into the queue later waits for the mark
  virtual void synchronize(int event) = 0;            // the calling thread waits; throws what failed on the device
  virtual void synchronize() = 0;                     // for everything

  // Everything put into queues between begin and end becomes one graph, and is not run; run_graph runs it.
  virtual void begin_capture() = 0;
  virtual int end_capture() = 0;
  virtual void run_graph(int graph) = 0;
};

// What a module hands over before anything else is touched.
struct DeviceEntry {
  uint32_t size;
  const char* fingerprint;
  Device* (*create)(int index);  // throws Error (usage) saying what is missing
};

inline bool is_asynchronous(std::string_view backend) { return backend != "cpu" && backend != "reference"; }
// Loads the module of a backend, so that its kernels are known to planning; needs no device. Nothing for cpu,
// reference.
void load_backend(const std::string& backend);
// The device itself; null for cpu and reference.
std::unique_ptr<Device> open_device(const std::string& backend, int index);
// Streams whose ops an asynchronous device runs; the others are the host's.
inline bool on_device(Stream stream) {
  return stream == Stream::compute || stream == Stream::to_device || stream == Stream::to_host;
}

}  // namespace strata
