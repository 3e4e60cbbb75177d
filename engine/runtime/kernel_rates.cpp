// Lone ops and their stopwatch; see kernel_rates.h.
#include "engine/runtime/kernel_rates.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "base/clock.h"
#include "engine/program/signature.h"
#include "engine/runtime/processor_wait.h"
#include "memory/arena.h"
#include "strata/convert.h"

namespace strata {
namespace {

constexpr int64_t kMostBytes = 64 << 20;  // of the tensors of one op
constexpr double kMostSeconds = 0.015;    // of one run, were its kernel ideal: short, so that some run is not disturbed
constexpr size_t kLeftOut = SIZE_MAX;

std::vector<TensorId> tensors_of(const Op& op) {
  std::set<TensorId> all;
  for (const auto* list : {&op.inputs, &op.outputs})
    for (TensorId id : *list)
      if (id) all.insert(id);
  return {all.begin(), all.end()};
}

// The op with copies of its tensors, each with memory of its own.
Program alone(const Program& program, const Op& op) {
  Program result;
  std::map<TensorId, TensorId> copies;
  for (TensorId id : tensors_of(op)) {
    Tensor copy = program[id];
    copy.part_of = {}, copy.part_offset = 0, copy.home = Tier::device;
    copies[id] = result.add(std::move(copy));
  }
  Op moved = op;
  for (auto* list : {&moved.inputs, &moved.outputs})
    for (TensorId& id : *list)
      if (id) id = copies[id];
  result.ops = {std::move(moved)};
  return result;
}

int64_t bytes_of(const Program& program) {
  int64_t bytes = 0;
  for (const Tensor& tensor : program.tensors) bytes += tensor.bytes();
  return bytes;
}

bool valid(const Program& program) {
  const Op& op = program.ops.front();
  try {
    const std::vector<TensorSpec> specs = op.kind->shape(OpView(program, op));
    if (specs.size() != op.outputs.size()) return false;
    for (size_t i = 0; i < specs.size(); ++i)
      if (specs[i].shape != program[op.outputs[i]].shape || specs[i].dtype != program[op.outputs[i]].dtype)
        return false;
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// Halves the largest dimension that the kind's shape rule lets be halved, in all tensors that have it; false: none.
bool make_smaller(Program& program) {
  std::set<int64_t, std::greater<>> sizes;
  for (const Tensor& tensor : program.tensors) sizes.insert(tensor.shape.begin(), tensor.shape.end());
  for (int64_t size : sizes) {
    if (size < 64) return false;
    Program smaller = program;
    for (Tensor& tensor : smaller.tensors) {
      Shape shape = tensor.shape;
      std::replace(shape.begin(), shape.end(), size, (size + 1) / 2);
      tensor.shape = std::move(shape);
    }
    if (!valid(smaller) || bytes_of(smaller) >= bytes_of(program)) continue;
    program = std::move(smaller);
    return true;
  }
  return false;
}

double expected(const OpView& view, const Rates& rates) {
  return ideal_seconds(cost_of(view), size_of(dtype_of(view)) == 2, view.op().stream == Stream::host, rates);
}

// What values decide about how long an op takes (attribute `share`: how much of it there is in the mean) is computed.
bool measurable(const Op& op) {
  return !op.attributes.has("share") && (op.stream == Stream::compute || op.stream == Stream::host) &&
         op.kind->name != "move" && !op.outputs.empty();
}

// Values that no kernel stumbles over: small numbers, scalars of 1, indices of 0.
void fill(const Tensor& tensor, std::byte* memory) {
  const int64_t count = elements(tensor.shape);
  const auto pattern = [](int64_t i) { return 0.01f * float(i % 7 - 3); };
  if (tensor.dtype == DType::f32) {
    for (int64_t i = 0; i < count; ++i) reinterpret_cast<float*>(memory)[i] = pattern(i);
  } else if (tensor.dtype == DType::f64) {
    std::fill_n(reinterpret_cast<double*>(memory), count, 1.0);
  } else if (is_half(tensor.dtype)) {  // 0.0078 in bf16, 0.0001 in f16 and so no denormal in either
    std::fill_n(reinterpret_cast<uint16_t*>(memory), count, uint16_t(tensor.dtype == DType::bf16 ? 0x3c00 : 0x2400));
  } else {
    std::fill_n(memory, tensor.bytes(), std::byte{0});
  }
}

int64_t last_cache() { return std::max<int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), 8 << 20); }

// An op bound to several places in memory, one after the other.
class BoundOp {
 public:
  BoundOp(const LoneOp& op, const std::string& backend, Threads& threads, std::byte* pool, int64_t pool_bytes)
      : op_(op) {
    const OpView view = op.view();
    const Kernel& kernel = view.op().kind->kernels.find(backend)->second;
    const int64_t workspace = kernel.workspace ? kernel.workspace(view, threads.count()) : 0;
    workspace_.resize(size_t(workspace) + 64);
    void* scratch = workspace_.data();
    size_t space = workspace_.size();
    std::align(64, size_t(workspace), scratch, space);
    const int64_t stride = stride_of(op);
    for (int64_t at = 0; at + stride <= pool_bytes && places_.size() < 16; at += stride) {
      std::vector<void*> pointers;
      std::byte* next = pool + at;
      for (const Tensor& tensor : op.program.tensors) {
        pointers.push_back(next);
        next += (tensor.bytes() + 63) / 64 * 64;
      }
      std::vector<void*> inputs, outputs;
      for (TensorId id : view.op().inputs) inputs.push_back(id ? pointers[size_t(id.value)] : nullptr);
      for (TensorId id : view.op().outputs) outputs.push_back(pointers[size_t(id.value)]);
      places_.push_back(
          {pool + at, kernel.bind(Binding(view, inputs, outputs, scratch, threads, nullptr, nullptr, &fault_))});
    }
  }

  static int64_t stride_of(const LoneOp& op) {
    int64_t bytes = 0;
    for (const Tensor& tensor : op.program.tensors) bytes += (tensor.bytes() + 63) / 64 * 64;
    return (bytes + 4095) / 4096 * 4096;
  }

  // Seconds of a few runs, the middle one.
  KernelTime typical(double until, bool may_be_disturbed) {
    for (const Place& place : places_) {
      std::byte* next = place.memory;
      for (const Tensor& tensor : op_.program.tensors) {
        fill(tensor, next);
        next += (tensor.bytes() + 63) / 64 * 64;
      }
    }
    constexpr double kEnough = 2e-3;
    std::vector<double> all;
    double spent = 0;
    const ProcessorWait wait;
    if (op_.expected < kEnough) places_.back().launch();  // threads awake, code in the cache
    for (size_t run = 0; run < 2 * places_.size() || run < 3; ++run) {
      const double began = seconds_now();
      places_[run % places_.size()].launch();
      const double seconds = seconds_now() - began;
      all.push_back(seconds);
      spent += seconds;
      if ((run > 0 && spent > kEnough) || began + seconds > until) break;
    }
    const double waited = wait.share();
    const auto middle = all.begin() + int64_t(all.size() - 1) / 2;
    std::nth_element(all.begin(), middle, all.end());
    return may_be_disturbed && waited > kDisturbed ? KernelTime{std::max(op_.expected, *middle * (1 - waited)), true}
                                                   : KernelTime{*middle};
  }

 private:
  struct Place {
    std::byte* memory;
    Launch launch;
  };
  const LoneOp& op_;
  std::vector<std::byte> workspace_;
  std::vector<Place> places_;
  uint64_t fault_ = 0;
};

}  // namespace

std::vector<LoneOp> lone_ops(const Program& program, const Rates& rates) {
  std::vector<std::pair<const Op*, int64_t>> ops = distinct_ops(program);
  for (const auto& [tensor, forms] : program.forms)
    for (const RestingForm& form : forms)
      for (const auto* list : {&form.rest, &form.restore})
        for (const Op& op : *list) ops.push_back({&op, 1});
  std::vector<LoneOp> result;
  std::map<std::tuple<std::string, double, double>, size_t> known;  // by name and cost in the program, and made smaller
  for (const auto& [op, count] : ops) {
    if (!measurable(*op)) continue;
    const OpView view(program, *op);
    LoneOp lone{.program = {}, .name = kernel_name(view), .cost = cost_of(view)};
    const std::tuple key(lone.name, lone.cost.flops, lone.cost.bytes);
    const double seconds = expected(view, rates) * double(count);
    if (const auto found = known.find(key); found != known.end()) {
      if (found->second < result.size()) result[found->second].weight += seconds;
      continue;
    }
    known[key] = kLeftOut;
    lone.program = alone(program, *op);
    const auto too_large = [&] {
      return bytes_of(lone.program) > kMostBytes || expected(lone.view(), rates) > kMostSeconds;
    };
    while (too_large() && make_smaller(lone.program)) {
    }
    if (too_large() || !valid(lone.program)) continue;
    lone.cost = cost_of(lone.view());
    const std::tuple small(lone.name, lone.cost.flops, lone.cost.bytes);
    if (small != key && known.contains(small)) {
      known[key] = known[small];
      continue;
    }
    known[key] = known[small] = result.size();
    lone.expected = expected(lone.view(), rates);
    lone.weight = seconds;
    result.push_back(std::move(lone));
  }
  std::stable_sort(result.begin(), result.end(), [](const LoneOp& a, const LoneOp& b) { return a.weight > b.weight; });
  return result;
}

std::vector<KernelTime> measure_kernels(const std::vector<LoneOp>& ops, const std::string& backend, int threads,
                                        int host_threads, int64_t working_set, double seconds, bool may_be_disturbed) {
  std::vector<KernelTime> best(ops.size());
  if (ops.empty()) return best;
  int64_t pool_bytes = std::clamp<int64_t>(working_set, 1 << 20, 2 * last_cache());
  for (const LoneOp& op : ops) pool_bytes = std::max(pool_bytes, BoundOp::stride_of(op));
  Arena pool(pool_bytes);
  std::memset(pool.base(), 0, size_t(pool_bytes));  // the pages' first touch takes longer than many an op
  Threads compute(threads), host(std::max(1, host_threads));
  const double began = seconds_now();
  for (int round = 1; round <= 2; ++round) {
    const double until = began + seconds * round / 2;
    for (size_t i = 0; i < ops.size(); ++i) {
      const LoneOp& op = ops[i];
      const bool on_host = op.view().op().stream == Stream::host;
      if (seconds_now() + 2 * op.expected > until || !op.view().op().kind->kernels.contains(backend)) continue;
      try {
        const KernelTime taken =
            BoundOp(op, backend, on_host ? host : compute, pool.base(), pool_bytes).typical(until, may_be_disturbed);
        if (best[i].seconds == 0 ||
            std::tie(taken.disturbed, taken.seconds) < std::tie(best[i].disturbed, best[i].seconds))
          best[i] = taken;
      } catch (const std::exception&) {  // cannot run by itself: priced by its cost
        best[i] = {};
      }
    }
  }
  return best;
}

}  // namespace strata
