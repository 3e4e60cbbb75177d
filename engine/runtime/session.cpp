// Configuration to plugins to plans; see session.h.
#include "engine/runtime/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "engine/plugin/order.h"
#include "engine/runtime/link_rates.h"
#include "engine/runtime/ranks.h"
#include "engine/runtime/saver.h"
#include "engine/runtime/storage.h"
#include "engine/runtime/usage.h"

namespace strata {
namespace {

// Bytes of the largest matrix that is multiplied.
int64_t largest_factor(const Program& program) {
  int64_t most = 0;
  for (const Op& op : program.ops)
    for (TensorId id : op.inputs)
      if (id && program[id].shape.size() > 1 && program[id].bytes() > most && cost_of(OpView(program, op)).flops > 0)
        most = program[id].bytes();
  return most;
}

bool spans_hosts(const World* world) { return world && world->local_size() < world->size(); }

// What a process takes beside its arenas. What is there already when the plan is made is measured (`resident`: code,
// libraries, plugins, the plan itself); the rest are figures measured once, which a test holds against runs.
ProcessMemory process_memory(const Session& session, const PlannedProgram& planned, size_t ops, int64_t resident) {
  constexpr int64_t kMiB = 1 << 20;
  constexpr int64_t kBinding = 2 << 10;    // of an op: kernel, pointers, waits
  constexpr int64_t kCode = 6 * kMiB;      // of libraries: touched first when the program runs
  constexpr int64_t kPacking = 4 * kMiB;   // of a thread, at most: oneDNN's copies of panels of matrices
  constexpr int64_t kWindows = 4 * kMiB;   // of memory that ranks of a host share
  constexpr int64_t kFabric = 272 * kMiB;  // libfabric's tcp: buffers for all that could be on its way at once
  const bool device = is_asynchronous(session.device.backend);
  ProcessMemory process;
  process.arenas = planned.arena_bytes[int(Tier::host)] + (device ? 0 : planned.arena_bytes[int(Tier::device)]);
  process.snapshot = planned.snapshot_bytes;
  process.program = resident + kCode + int64_t(ops) * kBinding;
  if (session.device.backend == "cpu")
    process.products = session.threads() * std::min(kPacking, largest_factor(planned.program()));
  process.transfers = device || planned.arena_bytes[int(Tier::nvme)] > 0 ? Storage::kPiece : 0;
  const std::string& provider = session.network.provider;
  const bool local = provider == "auto" || provider == kDeviceProvider;
  if (planned.ranks > 1) process.exchanges = kWindows + (local && !spans_hosts(session.world) ? 0 : kFabric);
  return process;
}

}  // namespace

Session::Session(const std::string& config_path, const std::vector<std::string>& sets, World* world)
    : config(Config::load(config_path, sets)), world(world) {
  const Sections sections = read_sections(config);
  run = sections.run;
  data = sections.data;
  device = sections.device;
  host = sections.host;
  mesh_section = sections.mesh;
  network = sections.network;
  if (world && world->size() != mesh_section.data)
    throw Error("[mesh] asks for " + std::to_string(mesh_section.data) + " ranks, but " +
                std::to_string(world->size()) + " were started; set mesh.data to that, or start as many.");
  mesh = Mesh(world ? world->rank() : 0, mesh_section.axes());
  load_backend(device.backend);
  if (is_asynchronous(device.backend))
    host.threads = std::max<int64_t>(1, host.threads);  // updates on the host are never between the device's ops
  settings = sections.settings;
  loaded_ = load_plugins(config, run.plugin_path, &settings);
  if (world) {
    require_same_settings(*world, settings);
    if (device.threads == 0) device.threads = smallest_of_ranks(*world, threads(), note);
  }
  for (const LoadedPlugin& plugin : loaded_) plugins.push_back({plugin.name(), &*plugin});
  plugins = in_order(plugins);
  require_exactly_one(plugins, "model", "set model.plugin");
  require_exactly_one(plugins, "optimizer",
                      "enable one by a table [plugins.NAME]" + installed_for("optimizer", run.plugin_path));
  for (const NamedPlugin& named : plugins)
    for (const std::string& capability : named.plugin->capabilities().provides)
      if (capability == "model") model_ = named.plugin;
}

// What would lower the largest categories: a smaller microbatch, and installed plugins that say they lower them by
// providing the capability "lowers <category>".
std::string Session::advice(const MemoryPlan& plan) const {
  std::string result;
  const auto category = [&](Role role) { return plan.device().at_peak[int(role)]; };
  if (data.micro_batch > 1 && category(Role::activation) * 10 > plan.device().total_bytes())
    result += " A smaller data.micro_batch lowers activations.";
  for (Role role : {Role::parameter, Role::gradient, Role::optimizer_state, Role::activation}) {
    if (category(role) * 10 < plan.device().total_bytes()) continue;
    const std::string capability = "lowers " + std::string(name_of(role));
    std::string names;
    for (const std::string& name : plugins_providing(capability, run.plugin_path)) {
      const bool enabled =
          std::any_of(plugins.begin(), plugins.end(), [&](const NamedPlugin& named) { return named.name == name; });
      if (!enabled) names += (names.empty() ? "" : ", ") + name;
    }
    if (!names.empty()) result += " Plugins that lower " + std::string(name_of(role)) + ": " + names + ".";
  }
  return result;
}

int Session::threads() const {
  return device.threads > 0 ? int(device.threads)
                            : std::max(1, int(std::thread::hardware_concurrency()) / (world ? world->local_size() : 1));
}

BatchShape Session::batch(Goal goal) const {
  return {.micro_batch = goal == Goal::logits ? 1 : data.micro_batch,
          .microbatches = goal == Goal::train ? data.global_batch / (data.micro_batch * mesh_section.data) : 1,
          .sequence_length = data.sequence_length,
          .reproducible = run.reproducible,
          .ranks = goal == Goal::train ? mesh_section.data : 1};
}

RatesWanted Session::rates_wanted(const Program& program) const {
  // Without a world: ranks that this host may have room for run here, more are one a host.
  constexpr int kMostHere = 8;
  const int processors = std::max(1, int(std::thread::hardware_concurrency()));
  const int here = world ? world->local_size() : mesh.size() <= std::max(kMostHere, processors) ? mesh.size() : 1;
  return {.threads = device.threads > 0 ? int(device.threads) : std::max(1, processors / here),
          .host_threads = int(host.threads),
          .backend = device.backend,
          .device = int(device.index),
          .storage_directory = program.storage_directory,
          .program = &program,
          .mesh = mesh.first(),
          .ranks_here = here,
          .provider = network.provider,
          .has_ranks = world && world->size() > 1};
}

// Rank 0's, so that all plan the same.
Rates Session::shared_rates(const Program& program) const {
  if (this->rates) return *this->rates;
  const RatesWanted wanted = rates_wanted(program);
  if (!wanted.has_ranks) return machine_rates(wanted);
  Rates rates;
  if (world->rank() == 0) rates = machine_rates(wanted);
  rates = rates_from(Json::parse(world->broadcast(to_json(rates).dump()), "rates"));
  measure_links(rates, wanted);
  return rates;
}

// Of axes whose link nobody has measured: by the ranks that are there, over what they will exchange through.
void Session::measure_links(Rates& rates, const RatesWanted& wanted) const {
  if (is_asynchronous(device.backend)) return;
  for (const Axis& axis : mesh.groups()) {
    if (axis.size == 1 || !rates.assumed.contains("link " + axis.name)) continue;
    const auto group = world->group("rates " + axis.name, axis.members);
    rates.links[axis.name].samples = measure_link(*group);
    rates.assumed.erase("link " + axis.name);
    if (world->rank() == 0) keep_link(wanted, axis.size, rates.links[axis.name].samples);
  }
  rates = rates_from(Json::parse(world->broadcast(to_json(rates).dump()), "rates"));
}

PlannedProgram Session::plan(Goal goal, const PlannedProgram* training) const {
  PlannedProgram planned = plan(goal, training, training ? training->snapshot_bytes : 0);
  if (goal != Goal::train || !run.save_behind) return planned;
  const int64_t snapshot = snapshot_bytes(planned.program().tensors, mesh.first());
  // Under a budget the copy takes its share, and more state goes to NVMe, of which there is no copy.
  const bool one_memory = !is_asynchronous(device.backend);
  if (const int64_t budget = host.memory.count + (one_memory ? device.memory.count : 0); budget > 0) {
    if (snapshot >= budget)
      throw Error(
          fmt::format("run.save_behind copies {} of state to host memory, and {} = {}; raise it, let "
                      "more state rest on NVMe, or save without it.",
                      bytes_text(snapshot), host.memory.count > 0 ? "host.memory" : "device.memory",
                      bytes_text(host.memory.count > 0 ? host.memory.count : device.memory.count)));
    planned = plan(goal, training, snapshot);
  }
  planned.snapshot_bytes = snapshot_bytes(planned.program().tensors, mesh.first());
  planned.process.snapshot = planned.snapshot_bytes;
  return planned;
}

PlannedProgram Session::plan(Goal goal, const PlannedProgram* training, int64_t host_bytes_beside) const {
  PlannedProgram planned;
  planned.snapshot_bytes = host_bytes_beside;
  planned.ranks = mesh.size();
  planned.built =
      build_program(plugins, batch(goal), goal, goal == Goal::logits ? Mesh() : mesh.first(), run.plugin_path);
  Program& program = planned.built.program;
  const bool resting = rests(program);
  planned.rates = training ? training->rates : resting || goal == Goal::train ? shared_rates(program) : Rates();
  const auto homes = training ? homes_of(training->program()) : std::map<std::string, Tier>();
  planned.memory =
      plan_residency(program, {.backend = device.backend,
                               .threads = std::max(threads(), int(host.threads)),  // workspaces do for either team
                               .host_stream = host.threads > 0,
                               .direct_storage = device.direct_storage,
                               .device_budget = device.memory.count,
                               .host_budget = host.memory.count,
                               .beside = host_bytes_beside,
                               .rates = planned.rates,
                               .homes = training ? &homes : nullptr,
                               .advice = [this](const MemoryPlan& plan) { return advice(plan); }});
  if (goal == Goal::train) {
    const auto on_host = [](const Op& op) { return op.stream == Stream::host; };
    if (std::any_of(program.ops.begin(), program.ops.end(), on_host)) planned.rates = shared_rates(program);
    planned.prediction = predict(program, planned.memory, planned.rates);
  }
  for (int t = 0; t < kTiers; ++t) planned.arena_bytes[t] = planned.memory.tiers[t].total_bytes();
  size_t ops = program.ops.size();
  if (goal == Goal::train && !data.validation.empty()) {  // transient memory of both is the same, at other times
    const PlannedProgram validation = plan(Goal::evaluate, &planned);
    ops += validation.program().ops.size();
    for (int t = 0; t < kTiers; ++t)
      planned.arena_bytes[t] = std::max(planned.arena_bytes[t], validation.memory.tiers[t].total_bytes());
  }
  planned.process = process_memory(*this, planned, ops, resident_bytes());
  return planned;
}

}  // namespace strata
