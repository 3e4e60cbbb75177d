// What a file may say of a machine; see described_machine.h.
#include "engine/runtime/described_machine.h"

#include "engine/config/config.h"
#include "strata/device.h"
#include "strata/error.h"
#include "strata/options.h"

namespace strata {

DescribedMachine::DescribedMachine(const std::string& file, const std::string& backend) {
  if (!is_asynchronous(backend))
    throw Error("--machine describes a device, but device.backend = \"" + backend + "\"; set it to \"cuda\".");
  const Config config = Config::load(file, {});
  Options options;
  const auto rate = [&](const char* name, double& variable, const char* help, const char* unit) -> Option& {
    return options.add(name, variable, help).positive().unit(unit);
  };
  rate("half_flops", machine_.half_flops, "of products of 16-bit numbers", "FLOP/s").required();
  rate("flops", machine_.flops, "of products in f32", "FLOP/s").required();
  rate("memory", machine_.memory, "of the device, as kernels reach it", "bytes/s").required();
  rate("copy", machine_.copy, "between device and host, either way", "bytes/s").required();
  rate("host_memory", machine_.host_memory, "of the host, as updates there reach it", "bytes/s").required();
  rate("read", disk_.read, "from one disk", "bytes/s").required();
  rate("write", disk_.write, "to one disk", "bytes/s").required();
  rate("half_peak", machine_.half_peak, "that nothing in 16 bits exceeds; shares of the peak are of it", "FLOP/s");
  rate("peak", machine_.peak, "that nothing in f32 exceeds", "FLOP/s");
  rate("launch", machine_.launch = 3e-6, "that an op takes at least", "seconds");
  rate("link", link_.bandwidth = 200e9, "that a rank hands to others", "bytes/s");
  for (const ConfigTable::Entry& entry : config.root().entries())
    if (entry.key != "rates") throw Error(entry.place, "a machine is described by one table, [rates].");
  const ConfigTable* table = config.root().table("rates");
  if (!table) throw Error(file + ": there is no [rates] table; it says how fast the machine is.");
  options.read(*table);
  machine_.described = file;
  for (const auto& [name, figure] : kFigures)
    if (machine_.*figure > 0) machine_.assumed.insert(std::string(name));
}

Rates DescribedMachine::rates(size_t folders, const Mesh& mesh) const {
  Rates rates = machine_;
  rates.disks.assign(folders, disk_);
  const DiskRates all = folders > 0 ? together(rates.disks, stripes_of(rates.disks)) : disk_;
  rates.read = all.read, rates.write = all.write;
  for (const Axis& axis : mesh.groups()) {
    if (axis.size == 1) continue;
    Link& link = rates.links[axis.name] = link_;
    link.ranks = axis.size;
    rates.assumed.insert("link " + axis.name);
  }
  return rates;
}

}  // namespace strata
