// The registry of op kinds, filled by static initializers before planning begins (op_kind.h).
#include "strata/op_kind.h"

#include <mutex>
#include <shared_mutex>

#include "engine/program/registering.h"
#include "strata/mesh.h"

namespace strata {
namespace {

std::map<std::string, OpKind, std::less<>>& registry() {
  // Never destroyed: it holds code of plugin libraries, whose own end may come first.
  static auto& kinds = *new std::map<std::string, OpKind, std::less<>>;
  return kinds;
}
// Kernels of kinds that no plugin has registered yet.
std::map<std::string, std::map<std::string, Kernel, std::less<>>>& early_kernels() {
  static auto& kernels = *new std::map<std::string, std::map<std::string, Kernel, std::less<>>>;
  return kernels;
}
// By kind: the plugin that registered it; empty for the engine's own.
std::map<std::string, std::string>& owners() {
  static auto& plugins = *new std::map<std::string, std::string>;
  return plugins;
}
std::string& registering() {
  static thread_local std::string plugin;
  return plugin;
}
// Ranks that are threads load plugins, which register kinds, at the same time.
std::shared_mutex& registry_mutex() {
  static auto& mutex = *new std::shared_mutex;
  return mutex;
}

std::vector<std::string> kind_names() {
  std::vector<std::string> names;
  for (const auto& [name, kind] : registry()) names.push_back(name);
  return names;
}

}  // namespace

RegisteringPlugin::RegisteringPlugin(std::string_view name) : before_(std::exchange(registering(), name)) {}
RegisteringPlugin::~RegisteringPlugin() { registering() = before_; }
const std::string& registering_plugin() { return registering(); }
std::string owner_of_kind(std::string_view name) {
  std::shared_lock lock(registry_mutex());
  const auto found = owners().find(std::string(name));
  return found == owners().end() ? "" : found->second;
}

const OpKind& register_kind(OpKind kind) {
  if (!kind.shape) throw Error("op kind \"" + kind.name + "\" has no shape rule; every kind needs one.");
  const std::string& by = registering();
  std::unique_lock lock(registry_mutex());
  const auto [at, inserted] = registry().emplace(kind.name, kind);
  if (inserted) {
    owners()[kind.name] = by;
    if (const auto early = early_kernels().find(kind.name); early != early_kernels().end())
      for (auto& [backend, kernel] : early->second) at->second.kernels.insert_or_assign(backend, kernel);
    return at->second;
  }
  const std::string& first = owners()[kind.name];
  if (by.empty() || by != first)
    throw Error("op kind \"" + kind.name + "\" is registered twice, first by " +
                (first.empty() ? "the engine" : "plugin \"" + first + "\"") + "; give the new kind another name.");
  return at->second;
}

void register_kernel(std::string_view kind, std::string_view backend, Kernel kernel) {
  std::unique_lock lock(registry_mutex());
  const auto found = registry().find(kind);
  auto& kernels = found == registry().end() ? early_kernels()[std::string(kind)] : found->second.kernels;
  kernels.insert_or_assign(std::string(backend), std::move(kernel));
}

const OpKind& find_kind(std::string_view name) {
  std::shared_lock lock(registry_mutex());
  const auto found = registry().find(name);
  if (found == registry().end())
    throw Error("no op kind is named \"" + std::string(name) + "\"." + did_you_mean(name, kind_names()));
  return found->second;
}

std::vector<const OpKind*> all_kinds() {
  std::shared_lock lock(registry_mutex());
  std::vector<const OpKind*> kinds;
  for (const auto& [name, kind] : registry()) kinds.push_back(&kind);
  return kinds;
}

TensorId OpView::addend(int output) const {
  if (!accumulates(output)) return {};
  const int before = __builtin_popcount(op_->accumulate & ((1u << output) - 1));
  return op_->inputs.at(inputs() + before);
}

Communicator& Binding::group() const {
  if (group_) return *group_;
  const std::string axis = attributes().has("axis") ? "axis \"" + attributes().string("axis") + "\"" : "no axis";
  throw Error("op \"" + op().kind->name + "\"" + (op().outputs.empty() ? "" : ", which makes " + output(0).name + ",") +
                  " asks for a group of ranks (" + axis + ", stream " + std::string(name_of(op().stream)) +
                  ") and has none: only exchanges (OpKind::exchange) over an axis of several ranks get one.",
              ExitCode::failed);
}

Stream stream_of(const OpKind& kind, const Attributes& attributes) {
  if (!kind.exchange) return Stream::compute;
  if (kind.name == "send") return Stream::send;
  if (kind.name == "receive") return Stream::receive;
  const std::string axis = attributes.has("axis") ? attributes.string("axis") : std::string(kDataAxis);
  const bool sums = axis == kDataAxis || axis == kReplicateAxis || axis == kShardAxis || axis == kShardExpertAxis;
  return sums ? Stream::exchange : Stream::model_exchange;
}

Op make_op(std::string_view kind, std::vector<TensorId> inputs, std::vector<TensorId> outputs, Attributes attributes) {
  const OpKind& found = find_kind(kind);
  const Stream stream = stream_of(found, attributes);
  return {.kind = &found,
          .inputs = std::move(inputs),
          .outputs = std::move(outputs),
          .attributes = std::move(attributes),
          .stream = stream};
}

Cost cost_of(const OpView& view) {
  if (view.op().kind->cost) return view.op().kind->cost(view);
  Cost cost;
  for (TensorId id : view.op().inputs)
    if (id) cost.bytes += double(view.program()[id].bytes());
  for (TensorId id : view.op().outputs) cost.bytes += double(view.program()[id].bytes());
  return cost;
}

void require(bool condition, const OpView& view, std::string_view expected) {
  if (condition) return;
  std::string message = "op \"" + view.op().kind->name + "\" expects " + std::string(expected) + ", but got";
  for (size_t i = 0; i < view.op().inputs.size(); ++i) {
    message += i ? ", " : " ";
    const TensorId id = view.op().inputs[i];
    message += id ? view.program()[id].name + " " + std::string(name_of(view.program()[id].dtype)) +
                        text(view.program()[id].shape)
                  : "nothing";
  }
  throw Error(message + ".");
}

}  // namespace strata
