// A device whose work is asynchronous: its memory, and queues that run ops beside the host. The backends cpu and
// reference have none; their kernels run on the threads of the executor. A device is a module of its own,
// lib/strata/devices/NAME.so, loaded only when a configuration asks for it; loading registers its kernels.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "strata/communicator.h"
#include "strata/fingerprint.h"
#include "strata/program.h"

namespace strata {

class World;  // comm/world.h

// A file that the device moves bytes from and to by itself. Both return when all is there; threads may call at once.
// Throw Error (failed) saying what the system said.
class DeviceFile {
 public:
  virtual ~DeviceFile() = default;
  virtual void read(int64_t offset, void* to, int64_t bytes) = 0;
  virtual void write(int64_t offset, const void* from, int64_t bytes) = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string describe() const = 0;  // "NVIDIA H200 (device 0, CUDA 13.0, driver 13.0)"
  virtual std::string identity() const = 0;  // the same for all that share the device, on all hosts another for others
  virtual int64_t free_bytes() const = 0;    // of its memory, now
  virtual double peak_flops(DType) const = 0;  // dense, of matrix products; 0: not known

  // Tier::device: its own memory, zero at first. Tier::host: pinned host memory, which it can read and write too.
  // Throws Error (failed) when there is not enough.
  virtual void* allocate(Tier tier, int64_t bytes) = 0;
  virtual void release(Tier tier, void* memory) = 0;
  virtual void copy(void* to, const void* from, int64_t bytes) = 0;  // either way or within; returns when done
  virtual void copy(void* to, const void* from, int64_t bytes, Stream stream) = 0;  // put into the queue
  // `rows` rows of `bytes` bytes, `to_step` and `from_step` bytes after one another; returns when done.
  virtual void copy_rows(void* to, int64_t to_step, const void* from, int64_t from_step, int64_t bytes,
                         int64_t rows) = 0;

  // An open file (for direct I/O) for transfers within this memory of the device; both outlive it. Throws Error (usage)
  // where the device or the file cannot do that.
  virtual std::unique_ptr<DeviceFile> open_file(int file, void* memory, int64_t bytes) = 0;

  // The queue of a stream of the program, as kernels take it (Binding::queue).
  virtual void* queue(Stream stream) = 0;
  // The queue of what a thread of the host runs: copies that return when done come after the kernels in it.
  virtual void* queue() = 0;
  // Events: numbered marks in queues.
  virtual int make_event(bool timed = false) = 0;
  virtual double seconds_between(int first, int second) const = 0;  // of timed events that are done
  virtual void record(int event, Stream stream) = 0;                // after what is in the queue now
  virtual void wait(Stream stream, int event) = 0;  // what comes into the queue later waits for the mark
  virtual bool reached(int event) = 0;              // nothing before the mark is under way; throws what failed
  virtual void synchronize() = 0;                   // the calling thread waits for everything; throws what failed
  virtual bool idle() = 0;                          // nothing is under way; throws what failed on the device

  // A group whose operations go into the queue of a stream of exchanges; called by all ranks of the world in the same
  // order, each with the members of its own group. Each rank has a device of its own. Throws Error where that cannot
  // be.
  virtual std::unique_ptr<Communicator> group(World& world, const std::string& name, const std::vector<int>& members,
                                              Stream stream, double timeout_seconds) = 0;

  // Everything put into queues between begin and end becomes one graph, and is not run; run_graph runs it.
  virtual void begin_capture() = 0;
  virtual int end_capture() = 0;
  virtual void run_graph(int graph) = 0;
};

// What a module hands over before anything else is touched.
struct DeviceEntry {
  uint32_t size;
  const char* fingerprint;
  // Device `index`, or where that is negative the one for a host's rank of this number. Throws Error (usage) saying
  // what is missing.
  Device* (*create)(int index, int local_rank);
};

inline bool is_asynchronous(std::string_view backend) { return backend != "cpu" && backend != "reference"; }
// Loads the module of a backend, so that its kernels are known to planning; needs no device. Nothing for cpu,
// reference.
void load_backend(const std::string& backend);
// The device itself (see DeviceEntry); null for cpu and reference.
std::unique_ptr<Device> open_device(const std::string& backend, int index, int local_rank = 0);
// Streams whose ops an asynchronous device runs; the others are the host's. Exchanges are the device's where their
// groups are asynchronous.
inline bool on_device(Stream stream) {
  return stream == Stream::compute || stream == Stream::to_device || stream == Stream::to_host;
}

}  // namespace strata
