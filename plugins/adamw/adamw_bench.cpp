// AdamW's bytes a second beside STREAM triad's (McCalpin) in the same run: the ratio is what counts.
// Triad counts 24 bytes an element; its store also fetches the line first, so a plain triad moves 32. Both a plain and
// a non-temporal triad are shown: the update must be compared with the faster.
#include <benchmark/benchmark.h>

#include <thread>
#include <vector>

#include "plugins/adamw/adamw_kernel.cpp"
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

constexpr int64_t kCount = 1 << 25;  // 128 MiB an array: far beyond any cache

int threads() { return std::max(1, int(std::thread::hardware_concurrency())); }

void report(benchmark::State& state, double bytes) {
  const double total = bytes * double(state.iterations());
  state.counters["GB/s"] = benchmark::Counter(total / 1e9, benchmark::Counter::kIsRate);
}

STRATA_SIMD void triad(double* a, const double* b, const double* c, double factor, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) a[i] = b[i] + factor * c[i];
}

void triad_streaming(double* a, const double* b, const double* c, double factor, int64_t count) {
#ifdef __SSE2__
  for (int64_t i = 0; i + 2 <= count; i += 2)
    _mm_stream_pd(a + i, _mm_add_pd(_mm_loadu_pd(b + i), _mm_mul_pd(_mm_set1_pd(factor), _mm_loadu_pd(c + i))));
  _mm_sfence();
#else
  triad(a, b, c, factor, count);
#endif
}

template <class Triad>
void run_triad(benchmark::State& state, Triad&& body) {
  strata::Threads team(threads());
  const int64_t count = kCount / 2;
  std::vector<double> a(count), b(count, 1.0), c(count, 2.0);
  for (auto _ : state)
    team.split(count, 4096, [&](int64_t i, int64_t e) { body(a.data() + i, b.data() + i, c.data() + i, 3.0, e - i); });
  report(state, 24.0 * double(count));
}

void Triad(benchmark::State& state) { run_triad(state, triad); }
void TriadStreaming(benchmark::State& state) { run_triad(state, triad_streaming); }

void AdamW(benchmark::State& state) {
  strata::Threads team(threads());
  std::vector<float> p(kCount, 1), g(kCount, 0.1f), m(kCount, 0), v(kCount, 0);
  const auto factors = strata::adamw::factors<float>({}, 10);
  for (auto _ : state) strata::adamw::update(team, p.data(), g.data(), m.data(), v.data(), kCount, factors);
  report(state, 28.0 * double(kCount));
}

BENCHMARK(Triad)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(TriadStreaming)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(AdamW)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
