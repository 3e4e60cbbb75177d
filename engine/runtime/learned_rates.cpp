// What steps that ran say of this machine: their ops, moves and exchanges, kept beside what was measured. See
// machine_rates.h.
#include <algorithm>
#include <map>
#include <tuple>

#include "engine/runtime/kernel_rates.h"
#include "engine/runtime/machine_probes.h"

namespace strata {
namespace {

// What ops of one kernel and cost took in a step.
struct Group {
  Cost cost;
  double seconds = 0;
  int64_t calls = 0;
};

}  // namespace

void keep_link(const RatesWanted& wanted, RatesCache& cache, int ranks, const Samples& samples) {
  cache.add(link_key(wanted, ranks), tries_of(samples));
}

void learn_rates(const RatesWanted& wanted, RatesCache& cache, const Program& program, const std::vector<Span>& spans,
                 const Rates& rates) {
  ExchangeTimes exchanges(program, rates);
  exchanges.add(spans);
  learn_rates(wanted, cache, program, spans, rates, exchanges);
}

void learn_rates(const RatesWanted& wanted, RatesCache& cache, const Program& program, const std::vector<Span>& spans,
                 const Rates& rates, const ExchangeTimes& exchanges) {
  constexpr double kShort = 20e-6;  // seconds that clocks and wake-ups blur
  constexpr int64_t kLarge = 1 << 20;
  std::map<std::tuple<std::string, double, double>, Group> kernels;
  std::array<double, kStreams> bytes{}, seconds{};
  std::array<double, 2> fastest{};  // FLOP/s, of f32 and 16 bits
  for (size_t i = 0; i < program.ops.size() && i < spans.size(); ++i) {
    const OpView view(program, program.ops[i]);
    const double took = spans[i].finish - spans[i].start;
    if (took < kShort || view.op().purpose == Purpose::again) continue;
    const Stream stream = view.op().stream;
    if (stream == Stream::compute || stream == Stream::host) {
      const Cost cost = cost_of(view);
      Group& group = kernels[{kernel_name(view), cost.flops, cost.bytes}];
      group.cost = cost, group.seconds += took, ++group.calls;
      double& best = fastest[size_of(dtype_of(view)) == 2];
      if (took > 1e-3) best = std::max(best, cost.flops / took);
    } else if (!is_exchange(stream) && view.input(0).bytes() >= kLarge) {
      bytes[int(stream)] += double(view.input(0).bytes()), seconds[int(stream)] += took;
    }
  }
  std::vector<Tried> machine;
  for (const auto& [key, group] : kernels)
    machine.push_back({std::get<0>(key), group.cost.flops, group.cost.bytes, group.seconds / double(group.calls)});
  const auto faster = [&](std::vector<Tried>& list, const char* name, double rate, double known) {
    if (rate > known && known > 0) list.push_back({.name = name, .value = rate});
  };
  const auto rate_of = [&](Stream stream) {
    return seconds[int(stream)] > 0 ? bytes[int(stream)] / seconds[int(stream)] : 0;
  };
  faster(machine, "peak", fastest[0], rates.peak);
  faster(machine, "half_peak", fastest[1], rates.half_peak);
  faster(machine, "copy", std::max(rate_of(Stream::to_device), rate_of(Stream::to_host)), rates.copy);
  cache.add(machine_key(wanted), machine);
  // What all disks did together, each did its share of.
  const double read = rate_of(Stream::read) / rates.read, write = rate_of(Stream::write) / rates.write;
  const std::vector<std::string> keys = disk_keys(wanted);
  for (size_t d = 0; d < keys.size() && keys.size() == rates.disks.size(); ++d) {
    if (keys[d].empty()) continue;
    const auto here = double(std::count(keys.begin(), keys.end(), keys[d]));  // folders that share its rates
    std::vector<Tried> disk;
    faster(disk, "read", rates.disks[d].read * here * read, rates.disks[d].read * here);
    faster(disk, "write", rates.disks[d].write * here * write, rates.disks[d].write * here);
    cache.add(keys[d], disk);
  }
  std::map<std::string, std::vector<Tried>> links;
  for (const auto& [axis, kind, handed_on, fewest, mean, tells_late] : exchanges.times()) {
    if (!rates.links.contains(axis)) continue;
    std::vector<Tried>& list = links[link_key(wanted, rates.links.at(axis).ranks)];
    list.push_back({kind, 0, handed_on, fewest});
    constexpr double kLeast = 1e-9;  // seconds: what is kept is more than none
    if (tells_late && !wanted.mesh[axis].own_programs)
      list.push_back({std::string(kLate) + kind, 0, handed_on, std::max(kLeast, mean - fewest)});
  }
  for (const auto& [key, tries] : links) cache.add(key, tries);
}

}  // namespace strata
