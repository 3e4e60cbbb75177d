// Selecting the largest elements and adding lists up, bytes a second of all that must be read and written, beside
// STREAM triad's (adamw_bench.cpp).
#include <benchmark/benchmark.h>

#include <random>
#include <thread>

#include "plugins/top_k/top_k_kernel.cpp"

namespace strata::top_k {
namespace {

constexpr int64_t kCount = 1 << 25;  // 128 MiB of f32: far beyond any cache

void run(benchmark::State& state, bool back) {
  const int count = std::max(1, int(std::thread::hardware_concurrency()));
  Threads threads(count);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(kCount), accumulated(kCount), drawn(1 << 16);
  for (float& value : drawn) value = normal(random);
  for (size_t i = 0; i < x.size(); ++i) x[i] = drawn[i % drawn.size()] * (1 + 1e-3f * float(i % 1009));
  const int64_t k = kept(kCount, 0.999), bytes = list_bytes(k, DType::f32);
  std::vector<std::byte> list(static_cast<size_t>(bytes)),
      workspace(static_cast<size_t>(workspace_bytes(kCount, count)));
  const auto take_all = [&] {
    take(threads, DType::f32, x.data(), kCount, k, 0, nullptr, accumulated.data(), workspace.data(), list.data());
  };
  take_all();
  for (auto _ : state)
    if (back)
      add_up(threads, DType::f32, list.data(), 1, bytes, k, 0, kCount, x.data());
    else
      take_all();
  // The gradient once and what is accumulated twice, or the result once.
  state.counters["GB/s"] = benchmark::Counter(
      double((back ? 4 : 12) * kCount + bytes) * double(state.iterations()) / 1e9, benchmark::Counter::kIsRate);
}
void TopKTake(benchmark::State& state) { run(state, false); }
void TopKAddUp(benchmark::State& state) { run(state, true); }

BENCHMARK(TopKTake)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(TopKAddUp)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace strata::top_k
