// Sums of predicted spans; see roofline.h.
#include "engine/planning/roofline.h"

#include <fmt/format.h>

#include <algorithm>

namespace strata {
namespace {

std::string_view resource(Stream stream) {
  switch (stream) {
    case Stream::compute:
      return "compute";
    case Stream::host:
      return "updates on the host";
    case Stream::to_device:
      return "copies to the device";
    case Stream::to_host:
      return "copies to the host";
    case Stream::read:
      return "reads from NVMe";
    case Stream::write:
      return "writes to NVMe";
    default:
      return "exchanges between ranks";
  }
}

std::string_view remedy(Stream stream, size_t disks) {
  switch (stream) {
    case Stream::host:
      return "twice the threads of the host (host.threads)";
    case Stream::read:
    case Stream::write:
      return disks > 1 ? "twice as many disks" : "a second disk as fast";
    case Stream::to_device:
    case Stream::to_host:
      return "a bus twice as fast";
    default:
      return "a network twice as fast";
  }
}

}  // namespace

Roofline roofline(const Program& program, const Prediction& prediction) {
  std::array<Busy, kStreams> all;
  for (size_t s = 0; s < all.size(); ++s) all[s].stream = Stream(s);
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    Busy& busy = all[size_t(op.stream)];
    (op.microbatch >= 0 ? busy.by_microbatch : busy.once) += prediction.spans[i].finish - prediction.spans[i].start;
  }
  Roofline result{.disks = std::max<size_t>(1, program.storage_directories.size())};
  for (const Busy& busy : all)
    if (busy.seconds() > 0) result.streams.push_back(busy);
  std::stable_sort(result.streams.begin(), result.streams.end(),
                   [](const Busy& a, const Busy& b) { return a.seconds() > b.seconds(); });
  if (result.streams.empty()) return result;
  const Busy &longest = result.streams.front(), &compute = all[size_t(Stream::compute)];
  result.reached = longest.seconds() / std::max(prediction.seconds, 1e-12);
  // compute.once + n * compute.by_microbatch >= longest.once + n * longest.by_microbatch
  const double gained = compute.by_microbatch - longest.by_microbatch;
  if (longest.stream == Stream::compute)
    result.microbatches = 1;
  else if (gained > 0)
    result.microbatches = (longest.once - compute.once) / gained;
  return result;
}

std::string roofline_text(const Roofline& roofline) {
  if (roofline.streams.empty()) return "";
  std::string text = "busy:";
  for (const Busy& busy : roofline.streams) text += fmt::format(" {} {:.3f} s,", resource(busy.stream), busy.seconds());
  text.pop_back();
  const Busy& longest = roofline.streams.front();
  text += fmt::format("\nthe step is bound by {}: {:.3f} s, {:.0f}% of it", resource(longest.stream), longest.seconds(),
                      100 * roofline.reached);
  if (longest.stream == Stream::compute) return text + "\n";
  if (roofline.microbatches > 0)
    text +=
        fmt::format("; {:.3g} times data.global_batch hides them behind compute", std::max(1.0, roofline.microbatches));
  else
    text +=
        "; each microbatch brings more of them than it computes: a larger data.micro_batch hides them, not more "
        "microbatches";
  return text + fmt::format("; {} halves them\n", remedy(longest.stream, roofline.disks));
}

}  // namespace strata
