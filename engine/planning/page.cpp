// Puts the page together, and the picture; see page.h. The parts are in page_summary, page_memory and page_streams.
#include "engine/planning/page.h"

#include <algorithm>
#include <cmath>

#include "engine/planning/page_drawing.h"

namespace strata {
namespace {

using namespace page;

void details(Text& text, const PageRun& run, bool open, bool with_key) {
  text.put("<details{}><summary>{}</summary>\n", open ? " open" : "", escaped(run.name));
  if (with_key) {
    auto entries = roles_of({&run, 1});
    if (budget_of(run, Tier::device) > 0 || budget_of(run, Tier::host) > 0)
      entries.emplace_back("currentColor", "budget (a line)");
    text.key(entries);
  }
  for (int t = 0; t < kTiers; ++t)
    if (run.memory->tiers[size_t(t)].total_bytes() > 0) memory_timeline(text, run, Tier(uint8_t(t)));
  stream_timeline(text, run);
  text.put("</details>\n");
}

// A picture is shown by itself, on pages of any colour.
constexpr std::string_view kPictureStyle =
    "text{font:12px system-ui,sans-serif;fill:#1a1a1a}.title{font-weight:600;font-size:14px}.soft{fill:#666}"
    ".axis{stroke:#ddd;stroke-width:1}.budget{stroke:#1a1a1a;stroke-width:1.5}.mark{stroke:#1a1a1a;stroke-dasharray:3 "
    "3}";

}  // namespace

std::string memory_page(const std::string& title, const std::string& machine, std::span<const PageRun> runs) {
  Text text;
  text.put("{}<h1>Memory of {}</h1>\n<p>{}</p>\n", page_head("Memory of " + title), escaped(title), escaped(machine));
  if (runs.size() > 1) {
    summary(text, runs);
    peaks(text, runs);
  }
  int clocks = 0;
  for (const PageRun& run : runs) clocks = std::max(clocks, run.clock + 1);
  for (int clock = 0; clock < clocks; ++clock) stages_timeline(text, runs, clock);
  for (size_t i = 0; i < runs.size(); ++i) details(text, runs[i], i < 2, i == 0);
  text.put("</body></html>\n");
  return text.take();
}

std::string memory_picture(const std::string& title, std::span<const PageRun> runs) {
  constexpr size_t kMostColumns = 4;
  constexpr double kTop = 56, kPanel = 170, kGap = 26, kHead = 40, kFoot = 26;
  const size_t columns = std::min(runs.size(), kMostColumns), lines = (runs.size() + columns - 1) / columns;
  std::vector<Tier> tiers;
  double most = 1;
  for (Tier tier : {Tier::device, Tier::host})
    for (const PageRun& run : runs)
      if (const int64_t bytes = (*run.memory)[tier].total_bytes(); bytes > 0) {
        if (tiers.empty() || tiers.back() != tier) tiers.push_back(tier);
        most = std::max({most, double(bytes), double(budget_of(run, tier))});
      }
  const double step = round_bytes(most, 5), scale = std::ceil(most / step) * step;
  const double line_height = kHead + double(tiers.size()) * (kPanel + kGap) + kFoot;
  const double width = (kWidth - kLeft - 10 - double(columns - 1) * 16) / double(columns);
  Text text;
  text.put(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" role=\"img\">\n"
      "<style>{2}</style>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n<text class=\"title\" x=\"12\" "
      "y=\"22\">{3}</text>\n",
      kWidth, kTop + line_height * double(lines), kPictureStyle, escaped(title));
  double x = 12;
  for (const auto& [color, name] : roles_of(runs)) {
    text.put(
        "<rect x=\"{0:.0f}\" y=\"34\" width=\"10\" height=\"10\" fill=\"{1}\"/><text x=\"{2:.0f}\" "
        "y=\"43\">{3}</text>\n",
        x, color, x + 15, name);
    x += 15 + 7.2 * double(name.size()) + 16;
  }
  if (std::any_of(runs.begin(), runs.end(), [](const PageRun& run) { return budget_of(run, Tier::device) > 0; }))
    text.put(
        "<line class=\"budget\" x1=\"{0:.0f}\" x2=\"{1:.0f}\" y1=\"39\" y2=\"39\"/><text x=\"{2:.0f}\" y=\"43\">budget"
        "</text>\n",
        x, x + 14, x + 19);
  for (size_t i = 0; i < runs.size(); ++i) {
    const PageRun& run = runs[i];
    const double left = kLeft + double(i % columns) * (width + 16), top = kTop + double(i / columns) * line_height;
    text.put(
        "<text class=\"title\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text><text class=\"soft\" x=\"{:.1f}\" y=\"{:.1f}\">{} a "
        "step</text>\n",
        left, top + 16, escaped(run.name), left, top + 32, seconds_text(length_of(run)));
    const auto uses = [&](Tier tier) { return (*run.memory)[tier].total_bytes() > 0; };
    for (size_t t = 0; t < tiers.size(); ++t) {
      if (!uses(tiers[t])) continue;
      const Frame frame{.left = left,
                        .top = top + kHead + 16 + double(t) * (kPanel + kGap),
                        .width = width,
                        .height = kPanel - 16,
                        .seconds = length_of(run),
                        .bytes = scale};
      const bool first = i % columns == 0 || (*runs[i - 1].memory)[tiers[t]].total_bytes() == 0;
      byte_axis(text, frame, 5, first);
      const TierPlan& plan = (*run.memory)[tiers[t]];
      stacked(text, run, tiers[t], frame);
      text.put("<text x=\"{:.1f}\" y=\"{:.1f}\">{}: {} at the peak</text>\n", left, frame.top - 4,
               title_of(run, tiers[t]), bytes_text(plan.persistent_bytes + plan.live_peak_bytes));
      if (const int64_t budget = budget_of(run, tiers[t]); budget > 0)
        text.put("<line class=\"budget\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n", left,
                 left + width, frame.y(double(budget)), frame.y(double(budget)));
      if (std::none_of(tiers.begin() + int64_t(t) + 1, tiers.end(), uses))
        time_axis(text, frame, int(std::max(1.0, width / 75)));
    }
  }
  text.put("</svg>\n");
  return text.take();
}

}  // namespace strata
