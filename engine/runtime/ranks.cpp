// Groups and small exchanges of the step loop; see ranks.h.
#include "engine/runtime/ranks.h"

#include <filesystem>
#include <numeric>
#include <set>
#include <sstream>

#include "comm/staged.h"
#include "engine/planning/localize.h"
#include "strata/error.h"

namespace strata {

Groups make_groups(World& world, const Mesh& mesh, Device* device, const NetworkSection& network, bool reproducible) {
  Groups groups;
  if (world.size() == 1) return groups;
  bool own = device && (network.provider == kDeviceProvider || (network.provider == "auto" && !reproducible));
  if (own) {
    const std::vector<std::string> devices = world.gather(device->identity());
    const bool shared = std::set(devices.begin(), devices.end()).size() < devices.size();
    if (shared && network.provider == kDeviceProvider)
      throw Error(
          "network.provider = \"" + network.provider +
          "\" needs a device for each rank, but ranks share one; start fewer ranks a host, or set it to \"auto\".");
    own = !shared;
  }
  for (const Axis& axis : mesh.axes())
    if (axis.size > 1) {
      if (own)
        groups[axis.name] = device->group(world, axis.name, axis.members, network.timeout);
      else if (device)
        groups[axis.name] = staged_communicator(world.group(axis.name, axis.members), *device);
      else
        groups[axis.name] = world.group(axis.name, axis.members);
    }
  std::vector<int> all(static_cast<size_t>(world.size()));
  std::iota(all.begin(), all.end(), 0);
  groups["loop"] = world.group("loop", all);
  return groups;
}

std::string rank_directory(const std::string& directory, const World& world) {
  if (directory.empty() || world.size() == 1) return directory;
  if (!std::filesystem::is_directory(directory)) return directory;  // the store says what is wrong with it
  const std::string own = directory + "/rank-" + std::to_string(world.rank());
  std::error_code problem;
  std::filesystem::create_directory(own, problem);
  if (problem) throw Error(own + ": cannot make the folder: " + problem.message() + ".");
  return own;
}

void require_same_plan(World& world, const Program& program, const std::string& data) {
  if (world.size() == 1) return;
  const auto differs = [](const std::vector<std::string>& all) {
    for (size_t r = 1; r < all.size(); ++r)
      if (all[r] != all[0]) return int(r);
    return 0;
  };
  const auto sets = world.gather(data);
  if (const int r = differs(sets))
    throw Error("ranks read different data: rank 0 has " + sets[0] + ", rank " + std::to_string(r) + " has " +
                sets[size_t(r)] + "; give every rank the same files.");
  if (differs(world.gather(plan_hash(program))) == 0) return;
  const auto texts = world.gather(print(program));
  const int r = differs(texts);
  if (r == 0) return;
  std::istringstream a(texts[0]), b(texts[size_t(r)]);
  std::string first, other;
  while (std::getline(a, first) && std::getline(b, other) && first == other) {
  }
  throw Error("ranks have different plans; start all with one configuration. The first difference: rank 0 has\n  " +
              first + "\nrank " + std::to_string(r) + " has\n  " + other);
}

std::vector<double> values_of_ranks(const Groups& groups, std::vector<double> values) {
  const auto loop = groups.find("loop");
  if (loop == groups.end()) return values;
  Communicator& group = *loop->second;
  const size_t count = values.size();
  std::vector<double> all(count * size_t(group.size()));
  std::copy(values.begin(), values.end(), all.begin() + int64_t(count) * group.rank());
  std::vector<Pieces> parts;
  for (int r = 0; r < group.size(); ++r)
    parts.push_back({{reinterpret_cast<std::byte*>(all.data() + count * size_t(r)), int64_t(count * sizeof(double))}});
  group.all_gather(parts);
  return all;
}

double sum_over_ranks(const Groups& groups, std::vector<double> values) {
  const std::vector<double> all = values_of_ranks(groups, std::move(values));
  return std::accumulate(all.begin(), all.end(), 0.0);
}

}  // namespace strata
