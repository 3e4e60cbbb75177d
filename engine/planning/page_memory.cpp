// Memory on the page: bars of the peaks, timelines by category, the largest tensors; see page_drawing.h.
#include <algorithm>
#include <cmath>

#include "engine/planning/page_drawing.h"

namespace strata::page {
namespace {

std::string step_part_at(const PageRun& run, int32_t op) {
  if (op < 0) return "rest";
  const Op& at = run.program->ops[size_t(op)];
  std::string text(name_of(at.step_part));
  if (at.microbatch >= 0) text += fmt::format(", microbatch {}", at.microbatch);
  if (at.block >= 0) text += fmt::format(", block {}", at.block);
  return text;
}

std::string caption(const PageRun& run, Tier tier) {
  const TierPlan& plan = (*run.memory)[tier];
  int most = 0;
  for (int r = 1; r < kRoles; ++r)
    if (plan.at_peak[size_t(r)] > plan.at_peak[size_t(most)]) most = r;
  const int64_t bytes = plan.at_peak[size_t(most)], all = plan.persistent_bytes + plan.live_peak_bytes;
  const std::string last = plan.peak_op >= 0 && plan.live_peak_bytes > 0 && tier != Tier::nvme
                               ? fmt::format(" The peak is where op {} ({}) runs.", plan.peak_op,
                                             run.program->ops[size_t(plan.peak_op)].kind->name)
                               : "";
  return fmt::format("{} of {} are {} ({:.0f}%).{}", bytes_text(bytes), bytes_text(all), readable(name_of(Role(most))),
                     100.0 * double(bytes) / double(std::max<int64_t>(all, 1)), last);
}

void largest(Text& text, const PageRun& run, Tier tier) {
  constexpr size_t kMost = 8;
  const std::vector<Held> held = held_at(*run.program, *run.memory, tier, (*run.memory)[tier].peak_op);
  if (held.empty()) return;
  text.put("<table class=\"held\"><tr><th>Largest at the peak</th><th></th><th>category</th></tr>\n");
  for (size_t i = 0; i < held.size() && i < kMost; ++i)
    text.put("<tr><td>{}</td><td>{}</td><td><i style=\"background:{}\"></i>{}</td></tr>\n", escaped(held[i].name),
             bytes_text(held[i].bytes), kRoleColors[int(held[i].role)], readable(name_of(held[i].role)));
  int64_t rest = 0;
  for (size_t i = kMost; i < held.size(); ++i) rest += held[i].bytes;
  if (held.size() > kMost)
    text.put("<tr><td>{} others</td><td>{}</td><td></td></tr>\n", held.size() - kMost, bytes_text(rest));
  text.put("</table>\n");
}

// One bar: what is alive at the peak by category, and what is lost between tensors.
void bar(Text& text, const PageRun& run, Tier tier, double left, double y, double height, double bytes_a_unit,
         const std::string& label) {
  const TierPlan& plan = (*run.memory)[tier];
  text.put("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n", left - 8, y + 13, escaped(run.name));
  double x = left;
  for (int r = 0; r < kRoles; ++r) {
    const double width = double(plan.at_peak[size_t(r)]) / bytes_a_unit;
    if (width > 0)
      text.put("<rect x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\"><title>{}: {}</title></rect>\n",
               x, y, width, height, kRoleColors[r], readable(name_of(Role(r))), bytes_text(plan.at_peak[size_t(r)]));
    x += width;
  }
  const double end = left + double(plan.total_bytes()) / bytes_a_unit;
  if (end - x > 0.5)
    text.put(
        "<rect x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\"><title>lost between tensors: {}"
        "</title></rect>\n",
        x, y, end - x, height, kLost, bytes_text(plan.total_bytes() - plan.persistent_bytes - plan.live_peak_bytes));
  double after = std::max(x, end) + 8;
  if (const int64_t budget = budget_of(run, tier); budget > 0) {
    const double line = left + double(budget) / bytes_a_unit;
    if (line > after - 8 && line < after + 130) after = line + 8;  // not through the figures
    text.put(
        "<line class=\"budget\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"><title>budget: {3}</title>"
        "</line>\n",
        line, y - 3, y + height + 3, bytes_text(budget));
  }
  text.put("<text x=\"{:.1f}\" y=\"{}\">{}</text>\n", after, y + 13, label);
}

}  // namespace

void peaks(Text& text, std::span<const PageRun> runs) {
  text.put("<h2>What each takes at its peak</h2>\n");
  auto entries = roles_of(runs);
  entries.emplace_back(kLost, "lost between tensors");
  if (std::any_of(runs.begin(), runs.end(), [](const PageRun& run) { return budget_of(run, Tier::device) > 0; }))
    entries.emplace_back("currentColor", "budget (a line)");
  text.key(entries);
  for (int t = 0; t < kTiers; ++t) {
    const Tier tier{uint8_t(t)};
    int64_t most = 0;
    for (const PageRun& run : runs) most = std::max({most, (*run.memory)[tier].total_bytes(), budget_of(run, tier)});
    const int64_t first = (*runs[0].memory)[tier].total_bytes();
    const auto shown = [&](const PageRun& run) { return first > 0 || (*run.memory)[tier].total_bytes() > 0; };
    if (std::none_of(runs.begin(), runs.end(), shown) || most == 0) continue;
    const double left = 230, plot = kWidth - left - 160, row = 24;
    text.put("<h3>{}</h3>\n<p>{}</p>\n<svg viewBox=\"0 0 {} {}\" role=\"img\">\n", title_of(runs[0], tier),
             first > 0 ? fmt::format("Shorter is better; the percentage compares with “{}”.", escaped(runs[0].name))
                       : "What was moved off the device; runs that move nothing are left out.",
             kWidth, row * double(std::count_if(runs.begin(), runs.end(), shown)) + 8);
    double y = 5;
    for (const PageRun& run : runs) {
      if (!shown(run)) continue;
      const int64_t bytes = (*run.memory)[tier].total_bytes();
      std::string label = bytes_text(bytes);
      if (first > 0 && &run != &runs[0])
        label += fmt::format("  ({:+.0f}%)", 100.0 * double(bytes - first) / double(first));
      bar(text, run, tier, left, y, row - 6, double(most) / plot, label);
      y += row;
    }
    text.put("</svg>\n");
  }
}

void memory_timeline(Text& text, const PageRun& run, Tier tier) {
  const TierPlan& plan = (*run.memory)[tier];
  const double most = double(std::max({plan.total_bytes(), budget_of(run, tier), int64_t{1}}));
  const double step = round_bytes(most, 5);
  const Frame frame{.left = kLeft,
                    .top = 22,
                    .width = kPlot,
                    .height = 170,
                    .seconds = length_of(run),
                    .bytes = std::ceil(most / step) * step};
  const double bottom = frame.top + frame.height;
  text.put("<h3>{} over the step</h3>\n<p>{}</p>\n<svg viewBox=\"0 0 {} {}\" role=\"img\">\n", title_of(run, tier),
           caption(run, tier), kWidth, bottom + 24);
  byte_axis(text, frame, 5, true);
  const int peak_column = stacked(text, run, tier, frame);
  time_axis(text, frame, 8);
  budget_line(text, budget_of(run, tier), frame);
  const double peak = kLeft + kPlot * (peak_column + 0.5) / kColumns;
  const bool right = peak > kWidth * 0.6;
  text.put(
      "<line class=\"mark\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/><text x=\"{3:.1f}\" y=\"12\" "
      "text-anchor=\"{4}\">peak {5} at {6}</text>\n</svg>\n",
      peak, frame.top - 6, bottom, peak, right ? "end" : "start",
      bytes_text(plan.persistent_bytes + plan.live_peak_bytes), step_part_at(run, plan.peak_op));
  largest(text, run, tier);
}

}  // namespace strata::page
