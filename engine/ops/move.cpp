// move: the same bytes on another tier. Between arenas a copy; from and to the NVMe tier a read or a write.
// Emitted by the residency planner only.
#include <cstring>

#include "engine/ops/registration.h"

namespace strata {
namespace {

Launch bind(const Binding& b) {
  void* const to = b.out<void>(0);
  void* const from = const_cast<void*>(static_cast<const void*>(b.in<char>(0)));
  const int64_t bytes = b.input(0).bytes();
  if (b.input(0).home == Tier::nvme) return [=] { static_cast<StorageSlot*>(from)->read(to); };
  if (b.output(0).home == Tier::nvme) return [=] { static_cast<StorageSlot*>(to)->write(from); };
  return [=, &threads = b.threads()] {
    threads.split(bytes, 1 << 16, [&](int64_t begin, int64_t end) {
      std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, size_t(end - begin));
    });
  };
}

const AtLoad move_registered([] {
  OpKind kind{.name = "move", .summary = "x (…) -> x on another tier", .shape = [](const OpView& v) {
                require(v.inputs() == 1 && v.has_input(0), v, "one tensor");
                return std::vector<TensorSpec>{like(v.input(0))};
              }};
  kind.kernels = {{"cpu", {bind, {}}}, {"reference", {bind, {}}}};
  register_kind(std::move(kind));
});

}  // namespace
}  // namespace strata
