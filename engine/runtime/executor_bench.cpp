// What dispatch costs: a program of ops that do next to nothing, per op.
#include <benchmark/benchmark.h>

#include "engine/runtime/executor.h"
#include "strata/builder.h"

namespace strata {
namespace {

void dispatch(benchmark::State& state) {
  constexpr int kOps = 1000;
  Program program;
  Builder build(program);
  TensorId x = build.data("x", {16}, DType::f32);
  for (int i = 0; i < kOps; ++i) x = build.emit("clamp", {x}, {{"limit", 1.0}});
  program[x].step_output = true;
  Threads threads(2);
  const MemoryPlan plan = plan_memory(program, "cpu", 2);
  Storage storage(program, plan);
  Executor executor(program, plan, storage, "cpu", threads);
  for (auto _ : state) executor.run();
  state.counters["ns_per_op"] = benchmark::Counter(double(state.iterations()) * kOps / 1e9,
                                                   benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}
BENCHMARK(dispatch)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace strata
