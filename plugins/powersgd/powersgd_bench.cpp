// What PowerSGD does to a matrix of gradients on one rank, bytes a second of all that must be read and written, beside
// STREAM triad's (adamw_bench.cpp); by rank.
#include <benchmark/benchmark.h>

#include <cmath>
#include <thread>
#include <vector>

#include "plugins/powersgd/powersgd_kernel.cpp"

namespace strata::powersgd {
namespace {

constexpr int64_t kRows = 1 << 13, kColumns = 1 << 12;  // 128 MiB of f32: far beyond any cache

// What crosses is made of the gradient, in two parts, and read.
enum class Part { project, project_back, finish };

void run(benchmark::State& state, Part part) {
  const Sizes sizes{kRows, kColumns, state.range(0)};
  Threads threads(std::max(1, int(std::thread::hardware_concurrency())));
  std::vector<float> x(kRows * kColumns), matrix(x.size()), query(size_t(sizes.rank * kColumns)), right(query.size()),
      left(size_t(sizes.rank * kRows));
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(i % 1009) - 500;
  for (size_t i = 0; i < query.size(); ++i) query[i] = float(std::cos(double(i)));
  project(threads, sizes, DType::f32, x.data(), query.data(), matrix.data(), left.data());
  orthonormalize(sizes, left.data());
  project_back(threads, sizes, left.data(), matrix.data(), right.data());
  for (auto _ : state) {
    if (part == Part::project) project(threads, sizes, DType::f32, x.data(), query.data(), matrix.data(), left.data());
    if (part == Part::project_back) project_back(threads, sizes, left.data(), matrix.data(), right.data());
    if (part == Part::finish)
      finish(threads, sizes, 2, left.data(), right.data(), matrix.data(), query.data(), 0, kRows, DType::f32, x.data());
  }
  // The gradient once and the error twice; the error once; the error twice and the result once.
  const double bytes = (part == Part::project_back ? 4 : 12) * double(x.size());
  state.counters["GB/s"] = benchmark::Counter(bytes * double(state.iterations()) / 1e9, benchmark::Counter::kIsRate);
}
void PowerSgdProject(benchmark::State& state) { run(state, Part::project); }
void PowerSgdProjectBack(benchmark::State& state) { run(state, Part::project_back); }
void PowerSgdFinish(benchmark::State& state) { run(state, Part::finish); }

BENCHMARK(PowerSgdProject)->Arg(1)->Arg(4)->Arg(8)->Arg(32)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(PowerSgdProjectBack)->Arg(1)->Arg(4)->Arg(8)->Arg(32)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(PowerSgdFinish)->Arg(1)->Arg(4)->Arg(8)->Arg(32)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace strata::powersgd
