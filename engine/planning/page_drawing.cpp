// Figures, axes and stacked paths; see page_drawing.h.
#include "engine/planning/page_drawing.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace strata::page {
namespace {

constexpr std::string_view kStyle = R"(
:root { color-scheme: light dark; --text: #1a1a1a; --soft: #666; --line: #ccc; --back: #fff; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --soft: #a0a0a0; --line: #444; --back: #16181c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 2em auto;
  max-width: 1120px; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; } h3 { font-size: 1em; margin-bottom: .2em; }
p { color: var(--soft); margin: .2em 0 .6em; max-width: 75ch; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; font-size: .82em; }
th, td { padding: .25em .45em; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
.held { margin: .4em 0 1.2em; } .held i, .key i { display: inline-block; width: .8em; height: .8em; margin-right: .4em;
  border-radius: 2px; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: var(--text); } svg .soft { fill: var(--soft); }
svg .axis { stroke: var(--line); stroke-width: 1; } svg .mark { stroke: var(--text); stroke-dasharray: 3 3; }
svg .budget { stroke: var(--text); stroke-width: 2; } svg .spread { stroke: var(--soft); stroke-width: 1.5; }
svg .best { fill: var(--text); } svg .other { fill: var(--back); stroke: var(--text); stroke-width: 1.5; }
.key span { display: inline-block; margin-right: 1.2em; font-size: .88em; }
details { margin: 1em 0; } summary { cursor: pointer; font-weight: 600; font-size: 1.1em; }
)";

}  // namespace

std::string page_head(std::string_view title) {
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<meta name=\"viewport\" "
      "content=\"width=device-width\">\n<title>{}</title>\n<style>{}</style></head><body>\n",
      escaped(title), kStyle);
}

std::string escaped(std::string_view text) {
  std::string result;
  for (char c : text) {
    switch (c) {
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '&':
        result += "&amp;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

std::string readable(std::string_view name) {
  std::string result(name);
  std::replace(result.begin(), result.end(), '_', ' ');
  return result;
}

std::string seconds_text(double seconds) {
  return seconds >= 1      ? fmt::format("{:.2f} s", seconds)
         : seconds >= 1e-3 ? fmt::format("{:.1f} ms", seconds * 1e3)
                           : fmt::format("{:.0f} µs", seconds * 1e6);
}

std::string title_of(const PageRun& run, Tier tier) {
  if (tier == Tier::nvme) return "NVMe memory";
  std::string name = memory_name(*run.program, tier);
  name[0] = char(std::toupper(name[0]));
  return name;
}

double round_step(double all, int count) {
  if (!(all > 0)) return 1;
  for (double unit = std::pow(10, std::floor(std::log10(all / count)));; unit *= 10)
    for (double factor : {1., 2., 5.})
      if (all / (unit * factor) <= count) return unit * factor;
}

double round_bytes(double all, int count) {
  double step = 1;
  while (all / step > count) step *= 2;
  return step;
}

std::string tick_seconds(double seconds) {
  if (seconds == 0) return "0";
  return seconds >= 0.1    ? fmt::format("{:.6g} s", seconds)
         : seconds >= 1e-4 ? fmt::format("{:.6g} ms", seconds * 1e3)
                           : fmt::format("{:.6g} µs", seconds * 1e6);
}

std::string tick_bytes(double bytes) {
  constexpr std::string_view units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes == 0) return "0";
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(units)) bytes /= 1024, ++unit;
  return fmt::format("{:.6g} {}", bytes, units[unit]);
}

void Text::key(const std::vector<std::pair<std::string_view, std::string>>& entries) {
  text_ += "<div class=\"key\">";
  for (const auto& [color, name] : entries) put("<span><i style=\"background:{}\"></i>{}</span>", color, escaped(name));
  text_ += "</div>\n";
}

Ledger resting(const PageRun& run, Tier tier) {
  Ledger bytes{};
  for (const Tensor& tensor : run.program->tensors)
    if (tensor.persistent && !tensor.part_of && tensor.home == tier) bytes[int(tensor.role)] += tensor.bytes();
  return bytes;
}

double length_of(const PageRun& run) {
  double length = 0;
  for (const Span& span : run.spans) length = std::max(length, span.finish);
  return std::max(length, 1e-9);
}

int64_t budget_of(const PageRun& run, Tier tier) { return run.budgets[size_t(tier)]; }

std::vector<std::pair<std::string_view, std::string>> roles_of(std::span<const PageRun> runs) {
  std::vector<std::pair<std::string_view, std::string>> entries;
  for (int r = 0; r < kRoles; ++r)
    if (std::any_of(runs.begin(), runs.end(), [&](const PageRun& run) {
          const auto has_role = [&](const auto& held) { return held.role == Role(r); };  // workspaces are no tensors
          return std::any_of(run.program->tensors.begin(), run.program->tensors.end(), has_role) ||
                 std::any_of(run.memory->buffers.begin(), run.memory->buffers.end(), has_role);
        }))
      entries.emplace_back(kRoleColors[r], readable(name_of(Role(r))));
  return entries;
}

int stacked(Text& text, const PageRun& run, Tier tier, const Frame& frame) {
  const std::vector<Ledger> live = timeline(*run.program, *run.memory, tier);
  const Ledger always = resting(run, tier);
  const auto sum = [](const Ledger& ledger) { return std::accumulate(ledger.begin(), ledger.end(), int64_t{0}); };
  const double length = length_of(run);
  std::vector<Ledger> columns(kColumns);
  std::vector<bool> known(kColumns, false);
  double now = 0;
  int peak_column = 0;
  for (size_t i = 0; i < live.size(); ++i) {  // each column shows the fullest moment of its share of the time
    now = std::max(now, run.spans[i].start);  // what is alive follows the order of the program
    const int column = std::min(kColumns - 1, int(now / length * kColumns));
    if (!known[size_t(column)] || sum(live[i]) > sum(columns[size_t(column)])) columns[size_t(column)] = live[i];
    known[size_t(column)] = true;
    if (int32_t(i) == (*run.memory)[tier].peak_op) peak_column = column;
  }
  for (size_t c = 1; c < kColumns; ++c)
    if (!known[c]) columns[c] = columns[c - 1];

  std::vector<int64_t> below(kColumns, 0);
  const auto x = [&](size_t c) { return frame.x(length * double(c) / kColumns); };
  const auto y = [&](int64_t bytes) { return frame.y(double(bytes)); };
  for (int r = 0; r < kRoles; ++r) {
    bool any = false;
    std::vector<int64_t> above = below;
    for (size_t c = 0; c < kColumns; ++c) {
      above[c] += always[size_t(r)] + columns[c][size_t(r)];
      any |= above[c] > below[c];
    }
    if (!any) continue;
    // Steps: horizontal to the column, then vertical to its height; back along the lower edge.
    std::string path = fmt::format("M{:.1f} {:.1f}", x(0), y(above[0]));
    for (size_t c = 1; c < kColumns; ++c)
      if (above[c] != above[c - 1]) path += fmt::format("H{:.1f}V{:.1f}", x(c), y(above[c]));
    path += fmt::format("H{:.1f}V{:.1f}", x(kColumns), y(below[kColumns - 1]));
    for (size_t c = kColumns - 1; c > 0; --c)
      if (below[c] != below[c - 1]) path += fmt::format("H{:.1f}V{:.1f}", x(c), y(below[c - 1]));
    text.put("<path d=\"{}H{:.1f}Z\" fill=\"{}\"><title>{}</title></path>\n", path, x(0), kRoleColors[r],
             readable(name_of(Role(r))));
    below = above;
  }
  return peak_column;
}

void byte_axis(Text& text, const Frame& frame, int count, bool labels) {
  const double step = round_bytes(frame.bytes, count);
  for (double at = 0; at <= frame.bytes * 1.0001; at += step) {
    text.put("<line class=\"axis\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n", frame.left,
             frame.left + frame.width, frame.y(at), frame.y(at));
    if (labels)
      text.put("<text class=\"soft\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n", frame.left - 6,
               frame.y(at) + 4, tick_bytes(at));
  }
}

void time_axis(Text& text, const Frame& frame, int count) {
  const double step = round_step(frame.seconds, count), bottom = frame.top + frame.height;
  for (int i = 0; double(i) * step <= frame.seconds * 1.0001; ++i)
    text.put(
        "<line class=\"axis\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\"/><text class=\"soft\" "
        "x=\"{0:.1f}\" y=\"{3:.1f}\" text-anchor=\"middle\">{4}</text>\n",
        frame.x(double(i) * step), bottom, bottom + 4, bottom + 17, tick_seconds(double(i) * step));
}

void budget_line(Text& text, int64_t budget, const Frame& frame) {
  if (budget <= 0 || double(budget) > frame.bytes) return;
  text.put(
      "<line class=\"budget\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"><title>budget: {}</title>"
      "</line><text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">budget {}</text>\n",
      frame.left, frame.left + frame.width, frame.y(double(budget)), frame.y(double(budget)), bytes_text(budget),
      frame.left + frame.width - 4, frame.y(double(budget)) - 4, bytes_text(budget));
}

}  // namespace strata::page
