// Gradients to codes and back, bytes a second of f32 and codes together, beside STREAM triad's (adamw_bench.cpp).
#include <benchmark/benchmark.h>

#include <thread>

#include "plugins/quantized_exchange/codes.cpp"

namespace strata::quantized {
namespace {

constexpr int64_t kCount = 1 << 25;  // 128 MiB of f32: far beyond any cache

template <Format format>
void run(benchmark::State& state, bool back, bool stochastic = true) {
  Threads threads(std::max(1, int(std::thread::hardware_concurrency())));
  std::vector<float> x(kCount);
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(i % 1009) - 500;
  const int64_t bytes = packed_bytes(format, kCount);
  const Noise noise{1, 2, 3};
  std::vector<std::byte> codes(static_cast<size_t>(bytes));
  pack(threads, format, DType::f32, x.data(), kCount, {1, 2, 3}, codes.data());
  for (auto _ : state)
    if (back)
      unpack(threads, format, codes.data(), 1, 0, kCount, DType::f32, x.data());
    else
      pack(threads, format, DType::f32, x.data(), kCount, stochastic ? &noise : nullptr, codes.data());
  state.counters["GB/s"] =
      benchmark::Counter(double(4 * kCount + bytes) * double(state.iterations()) / 1e9, benchmark::Counter::kIsRate);
}
template <Format format>
void QuantizedPack(benchmark::State& state) {
  run<format>(state, false);
}
template <Format format>
void QuantizedPackToNearest(benchmark::State& state) {
  run<format>(state, false, false);
}
template <Format format>
void QuantizedUnpack(benchmark::State& state) {
  run<format>(state, true);
}

BENCHMARK(QuantizedPack<Format::int8>)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(QuantizedUnpack<Format::int8>)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(QuantizedPack<Format::int4>)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(QuantizedUnpack<Format::int4>)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(QuantizedPackToNearest<Format::int8>)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(QuantizedPack<Format::fp8_e4m3>)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(QuantizedUnpack<Format::fp8_e4m3>)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(QuantizedPack<Format::bf16>)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(QuantizedUnpack<Format::bf16>)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace strata::quantized
