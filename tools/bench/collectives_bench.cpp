// Times this library's collectives between processes of one host; tools/bench/collectives compares it with its peers.
// collectives_bench RANKS PROVIDER BYTES... -> one line "all_reduce 65536 0.000012" (seconds a call) for each.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "comm/process_world.h"

using namespace strata;

static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds a call: the median of seven batches that take about fifty milliseconds each.
static double time_of(Communicator& group, const std::function<void()>& call) {
  call();
  group.barrier();
  double began = now();
  call();
  double calls = std::clamp(0.05 / (now() - began), 1.0, 2000.0);
  group.all_reduce({{reinterpret_cast<std::byte*>(&calls), 8}}, DType::f64, Reduction::max);  // as many on all ranks
  std::vector<double> batches;
  for (int batch = 0; batch < 7; ++batch) {
    group.barrier();
    began = now();
    for (int i = 0; i < int(calls); ++i) call();
    group.barrier();
    batches.push_back((now() - began) / int(calls));
  }
  std::sort(batches.begin(), batches.end());
  return batches[3];
}

static void measure(World& world, const std::vector<int64_t>& sizes) {
  std::vector<int> ranks;
  for (int r = 0; r < world.size(); ++r) ranks.push_back(r);
  const auto group = world.group("bench", ranks);
  std::vector<float> data(size_t(sizes.back() / 4), 1), other(data.size() / size_t(world.size()));
  for (int64_t bytes : sizes) {
    const int64_t part = bytes / world.size() / 64 * 64;
    auto* base = reinterpret_cast<std::byte*>(data.data());
    std::vector<Pieces> parts;
    for (int r = 0; r < world.size(); ++r) parts.push_back({{base + r * part, part}});
    const Pieces own{{reinterpret_cast<std::byte*>(other.data()), part}};
    const double times[] = {time_of(*group, [&] { group->all_reduce({{base, bytes}}, DType::f32); }),
                            time_of(*group, [&] { group->reduce_scatter(parts, own, DType::f32); }),
                            time_of(*group, [&] { group->all_gather(parts); })};
    std::fill(data.begin(), data.end(), 1.f);
    const char* names[] = {"all_reduce", "reduce_scatter", "all_gather"};
    if (world.rank() == 0)
      for (int i = 0; i < 3; ++i) std::printf("%s %lld %.9f\n", names[i], (long long)bytes, times[i]);
  }
}

int main(int argc, char** argv) {
  const int size = std::atoi(argv[1]);
  std::vector<int64_t> sizes;
  for (int i = 3; i < argc; ++i) sizes.push_back(std::atoll(argv[i]));
  const int port = 20000 + int(getpid()) % 20000;
  for (int rank = 0; rank < size; ++rank)
    if (fork() == 0) {
      try {
        const auto world = process_world({.rank = rank, .size = size, .port = port, .token = "bench", .version = "1"},
                                         {.provider = argv[2]}, size);
        measure(*world, sizes);
      } catch (const Error& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        return 1;
      }
      return 0;
    }
  int status = 0, failed = 0;
  while (wait(&status) > 0) failed |= status;
  return failed != 0;
}
