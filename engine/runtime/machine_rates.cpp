// Measuring and caching; see machine_rates.h.
#include "engine/runtime/machine_rates.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "engine/runtime/cache_path.h"
#include "engine/runtime/device_rates.h"
#include "engine/runtime/peak.h"
#include "memory/arena.h"
#include "memory/atomic_file.h"
#include "memory/nvme_store.h"
#include "strata/error.h"
#include "strata/json.h"

namespace strata {
namespace {

namespace fs = std::filesystem;
constexpr double kProductShare = 0.85;  // of the FMA peak that our matrix products reach

double seconds_of(const auto& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "unknown processor";
}

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

void measure_processor(int threads, Rates& rates) {
  double peak = 0;  // the best of several tries: other work on the machine only ever lowers it
  for (int i = 0; i < 8; ++i) peak = std::max(peak, measure_fma_peak(threads));
  rates.flops = rates.half_flops =
      kProductShare * peak;  // without instructions for them, products of 16 bits are f32's
  rates.memory = measure_triad_bandwidth(threads);
  constexpr int64_t kBytes = 64 << 20;
  Arena from(kBytes), to(kBytes);
  std::memset(from.base(), 1, kBytes);
  double best = 1e9;
  for (int i = 0; i < 4; ++i) best = std::min(best, seconds_of([&] { std::memcpy(to.base(), from.base(), kBytes); }));
  rates.copy = double(kBytes) / best;
}

void measure_storage(const std::string& directory, Rates& rates) {
  // Larger than the caches of most disks and hypervisors, in pieces like large tensors.
  constexpr int64_t kPiece = 64 << 20, kPieces = 32;
  NvmeStore store({.directory = directory, .bytes = kPiece * kPieces});
  auto channel = store.channel();
  Arena memory(kPiece);
  std::memset(memory.base(), 1, kPiece);
  const auto all = [&](auto&& transfer) {
    return double(kPiece * kPieces) / seconds_of([&] {
             for (int64_t piece = 0; piece < kPieces; ++piece) transfer(piece * kPiece);
           });
  };
  rates.write = all([&](int64_t at) { channel.write(at, memory.base(), kPiece, "a measurement"); });
  rates.read = all([&](int64_t at) { channel.read(at, memory.base(), kPiece, "a measurement"); });
}

// Named figures in one JSON object a key.
class Cache {
 public:
  explicit Cache(std::string path) : path_(std::move(path)) {
    std::ifstream file(path_);
    std::stringstream text;
    text << file.rdbuf();
    if (!file || text.str().empty()) return;
    try {
      content_ = Json::parse(text.str(), path_).object(path_);
    } catch (const Error&) {  // damaged: measured anew and replaced
      content_.clear();
    }
  }
  bool get(const std::string& key, std::initializer_list<std::pair<const char*, double*>> figures) const {
    for (const auto& [name, entry] : content_)
      if (name == key) {
        for (const auto& [figure, target] : figures) {
          const Json* value = entry.find(figure);
          if (!value) return false;
          *target = value->number(path_);
        }
        return true;
      }
    return false;
  }
  void put(const std::string& key, std::initializer_list<std::pair<const char*, double*>> figures) {
    Json::Object entry;
    for (const auto& [figure, value] : figures) entry.emplace_back(figure, *value);
    std::erase_if(content_, [&](const auto& old) { return old.first == key; });
    content_.emplace_back(key, std::move(entry));
    if (path_.empty()) return;
    std::error_code problem;
    fs::create_directories(fs::path(path_).parent_path(), problem);
    try {
      AtomicFile file(path_);
      file.write(Json(content_).dump(1) + "\n");
      file.commit();
    } catch (const Error&) {  // no cache: the next plan measures again
    }
  }

 private:
  std::string path_;
  Json::Object content_;
};

}  // namespace

Rates machine_rates(int threads, const std::string& storage_directory, const std::string& backend, int index) {
  Rates rates;
  Cache cache(cache_path("rates.json"));
  const bool device = is_asynchronous(backend);
  const std::string key = device ? fmt::format("{} {} since boot {}", backend, std::max(0, index), boot_id())
                                 : fmt::format("{}, {} threads", processor_name(), threads);
  const std::initializer_list<std::pair<const char*, double*>> compute = {{"flops", &rates.flops},
                                                                          {"half_flops", &rates.half_flops},
                                                                          {"memory", &rates.memory},
                                                                          {"copy", &rates.copy},
                                                                          {"launch", &rates.launch}};
  if (!cache.get(key, compute)) {
    bool measured = true;
    if (!device) {
      measure_processor(threads, rates);
    } else if (!(measured = measure_device_apart(backend, index, rates))) {
      // Planned where there is no device: an H100's data sheet, with what its products and copies usually reach.
      rates.flops = 50e12, rates.half_flops = 600e12, rates.memory = 2.5e12, rates.copy = 50e9, rates.launch = 3e-6;
      rates.assumed = true;
    }
    if (measured) cache.put(key, compute);
  }
  struct stat info;
  if (storage_directory.empty() || stat(storage_directory.c_str(), &info) != 0) return rates;
  const std::string disk = fmt::format("disk {}", info.st_dev);
  const std::initializer_list<std::pair<const char*, double*>> storage = {{"read", &rates.read},
                                                                          {"write", &rates.write}};
  if (!cache.get(disk, storage)) {
    try {
      measure_storage(storage_directory, rates);
      cache.put(disk, storage);
    } catch (const Error&) {  // in use or not writable: training says so, a plan is made with default rates
      rates.read = Rates().read;
      rates.write = Rates().write;
    }
  }
  return rates;
}

}  // namespace strata
