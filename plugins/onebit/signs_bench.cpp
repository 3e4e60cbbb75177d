// Gradients to bits and back, bytes a second of all that is read and written, beside STREAM triad's (adamw_bench.cpp).
#include <benchmark/benchmark.h>

#include <thread>

#include "plugins/onebit/signs.cpp"

namespace strata::onebit {
namespace {

constexpr int64_t kCount = 1 << 25;  // 128 MiB of f32: far beyond any cache

void run(benchmark::State& state, bool back) {
  Threads threads(std::max(1, int(std::thread::hardware_concurrency())));
  std::vector<float> x(kCount), error(kCount);
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(i % 1009) - 500;
  const int64_t bytes = list_bytes(kCount);
  std::vector<std::byte> list(static_cast<size_t>(bytes));
  pack(threads, DType::f32, x.data(), kCount, error.data(), list.data());
  for (auto _ : state)
    if (back)
      unpack(threads, list.data(), 1, 0, kCount, DType::f32, x.data());
    else
      pack(threads, DType::f32, x.data(), kCount, error.data(), list.data());
  // The gradient once and the error twice, or the result once.
  state.counters["GB/s"] = benchmark::Counter(
      double((back ? 4 : 12) * kCount + bytes) * double(state.iterations()) / 1e9, benchmark::Counter::kIsRate);
}
void OneBitPack(benchmark::State& state) { run(state, false); }
void OneBitUnpack(benchmark::State& state) { run(state, true); }

BENCHMARK(OneBitPack)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(OneBitUnpack)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace strata::onebit
