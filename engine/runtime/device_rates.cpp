// Growing sizes, timed by the device's own events; see device_rates.h.
#include "engine/runtime/device_rates.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
#include <vector>

#include "strata/builder.h"
#include "strata/error.h"
#include "strata/op_kind.h"

namespace strata {
namespace {

constexpr double kLongEnough = 2e-3;  // seconds: events resolve half a microsecond

class Memory {
 public:
  Memory(Device& device, Tier tier, int64_t bytes)
      : device_(device), tier_(tier), data_(device.allocate(tier, std::max<int64_t>(bytes, 64))) {}
  ~Memory() { device_.release(tier_, data_); }
  Memory(const Memory&) = delete;
  void* data() const { return data_; }

 private:
  Device& device_;
  Tier tier_;
  void* data_;
};

// Seconds that one run of an op takes on inputs of these shapes: `times` runs between two events, after one before.
double seconds_of_op(Device& device, const std::string& backend, const std::string& kind,
                     const std::vector<Shape>& inputs, DType dtype, Tier from = Tier::device, int times = 4) {
  Program program;
  Builder build(program);
  std::vector<TensorId> ids;
  for (const Shape& shape : inputs) ids.push_back(build.data("x", shape, dtype));
  build.emit_all(kind, ids, {});
  const OpView view(program, program.ops.back());
  std::vector<std::unique_ptr<Memory>> memory;
  const auto allocate = [&](Tier tier, int64_t bytes) {
    return memory.emplace_back(std::make_unique<Memory>(device, tier, bytes))->data();
  };
  std::vector<void*> in, out;
  for (TensorId id : ids) in.push_back(allocate(from, program[id].bytes()));
  for (TensorId id : view.op().outputs) out.push_back(allocate(Tier::device, program[id].bytes()));
  const Kernel& kernel = view.op().kind->kernels.find(backend)->second;
  void* const workspace = kernel.workspace ? allocate(Tier::device, kernel.workspace(view, 1)) : nullptr;
  Threads threads(1);
  const Launch launch = kernel.bind(Binding(view, in, out, workspace, threads, nullptr, device.queue(Stream::compute)));
  const int begin = device.make_event(true), end = device.make_event(true);
  launch();
  device.record(begin, Stream::compute);
  for (int i = 0; i < times; ++i) launch();
  device.record(end, Stream::compute);
  device.synchronize();
  return device.seconds_between(begin, end) / times;
}

// The best rate of growing sizes: small ones are over before the device is busy.
template <class Measure>
double best(int64_t smallest, int64_t largest, Measure&& measure) {
  double rate = 0;
  for (int64_t size = smallest; size <= largest; size *= 2) {
    const auto [work, seconds] = measure(size);
    rate = std::max(rate, work / seconds);
    if (seconds > kLongEnough) break;
  }
  return rate;
}

}  // namespace

void measure_device(Device& device, const std::string& backend, Rates& rates) {
  const auto products = [&](DType dtype) {
    return best(128, 8192, [&](int64_t n) {
      return std::pair(2.0 * double(n) * double(n) * double(n),
                       seconds_of_op(device, backend, "linear", {{n, n}, {n, n}}, dtype));
    });
  };
  const auto moved = [&](Tier from, double passes) {
    return best(1 << 16, 1 << 27, [&](int64_t count) {
      return std::pair(passes * 4 * double(count), seconds_of_op(device, backend, "move", {{count}}, DType::f32, from));
    });
  };
  rates.flops = products(DType::f32);
  rates.half_flops = products(DType::bf16);
  rates.memory = moved(Tier::device, 2);
  rates.copy = moved(Tier::host, 1);
  rates.launch = seconds_of_op(device, backend, "add", {{64}, {64}}, DType::f32, Tier::device, 256);
  rates.peak = std::max(rates.flops, device.peak_flops(DType::f32));
  rates.half_peak = std::max(rates.half_flops, device.peak_flops(DType::bf16));
}

bool measure_device_apart(const std::string& backend, int index, Rates& rates) {
  int ends[2];
  if (pipe(ends) != 0) return false;
  std::array<double, std::size(kFigures)> figures{};
  const pid_t child = fork();
  if (child == 0) {
    try {
      const auto device = open_device(backend, index);
      measure_device(*device, backend, rates);
      for (size_t i = 0; i < figures.size(); ++i) figures[i] = rates.*kFigures[i].second;
      const bool sent = write(ends[1], figures.data(), sizeof figures) == ssize_t(sizeof figures);
      _exit(sent ? 0 : 1);
    } catch (const std::exception&) {  // no device here: the caller says what it assumes
      _exit(1);
    }
  }
  close(ends[1]);
  const bool received = child > 0 && read(ends[0], figures.data(), sizeof figures) == ssize_t(sizeof figures);
  close(ends[0]);
  while (child > 0 && waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  for (size_t i = 0; received && i < figures.size(); ++i) rates.*kFigures[i].second = figures[i];
  return received;
}

}  // namespace strata
