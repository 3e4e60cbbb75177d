// The registry of op kinds, filled by static initializers before planning begins (op_kind.h).
#include "strata/op_kind.h"

#include <mutex>
#include <shared_mutex>

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

OpKind& register_kind(OpKind kind) {
  if (!kind.shape) throw Error("op kind \"" + kind.name + "\" has no shape rule; every kind needs one.");
  std::unique_lock lock(registry_mutex());
  const auto [at, inserted] = registry().emplace(kind.name, kind);
  if (const auto early = early_kernels().find(kind.name); inserted && early != early_kernels().end())
    for (auto& [backend, kernel] : early->second) at->second.kernels.insert_or_assign(backend, kernel);
  if (!inserted) throw Error("op kind \"" + kind.name + "\" is registered twice; give the new kind another name.");
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
