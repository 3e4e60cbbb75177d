// Cost rules to seconds; see rates.h.
#include "engine/planning/rates.h"

#include <algorithm>

namespace strata {

double seconds_of(const OpView& view, const Rates& rates) {
  const double bytes = view.inputs() > 0 && view.has_input(0) ? double(view.input(0).bytes()) : 0;
  switch (view.op().stream) {
    case Stream::to_device:
    case Stream::to_host:
      return rates.copy_latency + bytes / rates.copy;
    case Stream::read:
      return rates.storage_latency + bytes / rates.read;
    case Stream::write:
      return rates.storage_latency + bytes / rates.write;
    default:
      const Cost cost = cost_of(view);
      const bool half = bytes > 0 && size_of(view.input(0).dtype) == 2;
      return rates.launch + std::max(cost.flops / (half ? rates.half_flops : rates.flops), cost.bytes / rates.memory);
  }
}

}  // namespace strata
