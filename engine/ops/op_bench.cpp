// Memory-bound op kinds on the CPU backend at GPT-2 124M's shapes (1024 rows): GB/s by their cost rules' bytes, to be
// read beside the Triad benchmark in plugins/adamw. Not for matrix products and attention.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "strata/builder.h"

namespace {

using strata::Attributes;
using strata::DType;
using strata::Shape;
using strata::TensorId;

constexpr int64_t kRows = 1024, kHidden = 768, kInner = 3072, kVocabulary = 50257;

struct Input {
  Shape shape;
  DType dtype = DType::f32;
};

struct Aligned {
  explicit Aligned(int64_t bytes) : data(std::aligned_alloc(64, size_t((bytes + 63) / 64 * 64))) {}
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  void* data;
};

// Runs one op over and over. Floats are 0.5, tokens count upwards, scalars are 1.
void run(benchmark::State& state, const std::string& kind, const std::vector<Input>& inputs,
         const Attributes& attributes) {
  strata::Threads threads(std::max(1, int(std::thread::hardware_concurrency())));
  strata::Program program;
  strata::Builder build(program);
  build.microbatch = 0;
  std::vector<TensorId> ids;
  for (const Input& input : inputs) ids.push_back(build.data("input", input.shape, input.dtype));
  build.emit_all(kind, ids, attributes);
  const strata::OpView view(program, program.ops.back());
  std::vector<std::unique_ptr<Aligned>> memory;
  const auto allocate = [&](int64_t bytes) { return memory.emplace_back(new Aligned(bytes))->data; };
  std::vector<void*> in, out;
  for (TensorId id : ids) {
    in.push_back(allocate(program[id].bytes()));
    for (int64_t i = 0; i < strata::elements(program[id].shape); ++i) {
      if (program[id].dtype == DType::f32)
        static_cast<float*>(in.back())[i] = 0.5f;
      else if (program[id].dtype == DType::f64)
        static_cast<double*>(in.back())[i] = 1;
      else
        static_cast<int32_t*>(in.back())[i] = int32_t(i * 37 % kVocabulary);
    }
  }
  for (TensorId id : view.op().outputs) out.push_back(allocate(program[id].bytes()));
  const strata::Kernel& kernel = view.op().kind->kernels.at("cpu");
  void* workspace = kernel.workspace ? allocate(kernel.workspace(view, threads.count())) : nullptr;
  const strata::Launch launch = kernel.bind(strata::Binding(view, in, out, workspace, threads));
  for (auto _ : state) launch();
  const double bytes = cost_of(view).bytes * double(state.iterations());
  state.counters["GB/s"] = benchmark::Counter(bytes / 1e9, benchmark::Counter::kIsRate);
}

const Shape kX{4, 256, kHidden}, kUp{4, 256, kInner}, kQkv{4, 256, 3 * kHidden}, kWeight{kVocabulary, kHidden};
const Input kScalar{{1}, DType::f64}, kTokens{{4, 256}, DType::i32};
const Attributes kEpsilon{{"epsilon", 1e-5}};

#define BENCH(kind, ...) BENCHMARK_CAPTURE(run, kind, #kind, __VA_ARGS__)->UseRealTime()->Unit(benchmark::kMicrosecond)

BENCH(add, {{kX}, {kX}}, {});
BENCH(scale, {{kUp}, kScalar}, {});
BENCH(gelu, {{kUp}}, {});
BENCH(gelu_gradient, {{kUp}, {kUp}}, {});
BENCH(swiglu, {{kUp}, {kUp}}, {});
BENCH(swiglu_gradient, {{kUp}, {kUp}, {kUp}}, {});
BENCH(layer_norm, {{kX}, {{kHidden}}, {{kHidden}}}, kEpsilon);
BENCH(layer_norm_gradient, {{kX}, {kX}, {{kHidden}}, {{kRows, 2}}}, {});
BENCH(rms_norm, {{kX}, {{kHidden}}}, kEpsilon);
BENCH(rms_norm_gradient, {{kX}, {kX}, {{kHidden}}, {{kRows, 1}}}, {});
BENCH(rotary, {{kQkv}},
      {{"head_size", int64_t{64}}, {"queries_per_group", int64_t{1}}, {"base", 1e4}, {"inverse", int64_t{0}}});
BENCH(embedding, {kTokens, {kWeight}, {{1024, kHidden}}}, {});
BENCH(embedding_gradient, {{kX}, kTokens}, {{"rows", kVocabulary}});
BENCH(position_gradient, {{kX}}, {{"rows", int64_t{1024}}});
BENCH(dropout, {{kX}, kScalar, kScalar}, {{"probability", 0.1}, {"stream", int64_t{1}}});
BENCH(sum_rows, {{kUp}}, {});
BENCH(sum_of_squares, {{kWeight}}, {});

}  // namespace
