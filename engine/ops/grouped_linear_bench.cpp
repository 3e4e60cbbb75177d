// Products of groups of rows beside one product of the same size (linear), forward and both gradients, on the CPU
// backend: GFLOP/s. The rows of 8 experts are even, or as uneven as half for one and the rest shared.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "strata/builder.h"

namespace {

using strata::DType;
using strata::TensorId;

constexpr int64_t kRows = 4096, kHidden = 768, kInner = 3072, kExperts = 8;

class OneOp {
 public:
  OneOp(const std::string& kind, const std::vector<strata::Shape>& shapes, bool even)
      : threads_(std::max(1, int(std::thread::hardware_concurrency()))) {
    strata::Builder build(program_);
    std::vector<TensorId> ids;
    for (const strata::Shape& shape : shapes) ids.push_back(build.data("input", shape, DType::f32));
    const bool grouped = kind.starts_with("grouped");
    if (grouped) ids.push_back(build.data("offsets", {kExperts + 1}, DType::i32));
    build.emit_all(kind, ids, {});
    const strata::OpView view(program_, program_.ops.back());
    flops_ = cost_of(view).flops;
    std::vector<void*> in, out;
    for (TensorId id : ids) {
      in.push_back(allocate(program_[id].bytes()));
      if (program_[id].dtype == DType::f32)
        for (int64_t i = 0; i < elements(program_[id].shape); ++i) static_cast<float*>(in.back())[i] = 0.5f;
    }
    for (int64_t e = 0; grouped && e <= kExperts; ++e)
      static_cast<int32_t*>(in.back())[e] = int32_t(e == 0 ? 0
                                                    : even ? kRows * e / kExperts
                                                           : kRows / 2 + kRows / 2 * (e - 1) / (kExperts - 1));
    for (TensorId id : view.op().outputs) out.push_back(allocate(program_[id].bytes()));
    launch_ = view.op().kind->kernels.at("cpu").bind(strata::Binding(view, in, out, nullptr, threads_));
  }
  void run(benchmark::State& state) const {
    for (auto _ : state) launch_();
    state.counters["GFLOP/s"] =
        benchmark::Counter(flops_ * double(state.iterations()) / 1e9, benchmark::Counter::kIsRate);
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  void* allocate(int64_t bytes) {
    return memory_.emplace_back(std::aligned_alloc(64, size_t((bytes + 63) / 64 * 64))).get();
  }
  strata::Threads threads_;
  strata::Program program_;
  std::vector<std::unique_ptr<void, Free>> memory_;
  strata::Launch launch_;
  double flops_ = 0;
};

void products(benchmark::State& state, const std::string& kind, const std::vector<strata::Shape>& shapes, bool even) {
  OneOp(kind, shapes, even).run(state);
}

const strata::Shape kX{kRows, kHidden}, kY{kRows, kInner}, kOne{kInner, kHidden}, kAll{kExperts * kHidden, kInner};

#define BENCH(name, ...) BENCHMARK_CAPTURE(products, name, __VA_ARGS__)->UseRealTime()->Unit(benchmark::kMillisecond)

BENCH(one_up, "linear", {kX, kOne}, true);
BENCH(grouped_up, "grouped_linear", {kX, kAll}, true);
BENCH(grouped_up_uneven, "grouped_linear", {kX, kAll}, false);
BENCH(one_up_input_gradient, "linear_input_gradient", {kY, kOne}, true);
BENCH(grouped_up_input_gradient, "grouped_linear_transposed", {kY, kAll}, true);
BENCH(grouped_up_input_gradient_uneven, "grouped_linear_transposed", {kY, kAll}, false);
BENCH(one_weight_gradient, "linear_weight_gradient", {kX, kY}, true);
BENCH(grouped_weight_gradient, "grouped_linear_weight_gradient", {kX, kY}, true);
BENCH(grouped_weight_gradient_uneven, "grouped_linear_weight_gradient", {kX, kY}, false);

}  // namespace
