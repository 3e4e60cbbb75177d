// Draws the memory page as HTML with inline SVG; see page.h. Colours are those of Okabe and Ito, told apart by people
// who see few colours; hovering shows figures through <title>.
#include "engine/planning/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

namespace strata {
namespace {

constexpr double kWidth = 960, kLeft = 90, kRight = 20;  // of every drawing, in its own units
constexpr double kPlot = kWidth - kLeft - kRight;
constexpr int kColumns = 600;
constexpr std::string_view kRoleColors[kRoles] = {"#0072b2", "#e69f00", "#009e73", "#56b4e9",
                                                  "#999999", "#f0e442", "#cc79a7"};
constexpr std::string_view kForward = "#56b4e9", kBackward = "#0072b2", kUpdate = "#009e73", kAgain = "#cc79a7",
                           kMove = "#e69f00", kStall = "#d55e00";

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
svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: var(--text); } svg .soft { fill: var(--soft); }
svg .axis { stroke: var(--line); stroke-width: 1; } svg .mark { stroke: var(--text); stroke-dasharray: 3 3; }
.key span { display: inline-block; margin-right: 1.2em; font-size: .88em; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
details { margin: 1em 0; } summary { cursor: pointer; font-weight: 600; font-size: 1.1em; }
)";

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

std::string bytes_or_dash(int64_t bytes) { return bytes > 0 ? bytes_text(bytes) : "–"; }
std::string seconds_or_dash(double seconds) { return seconds > 0 ? seconds_text(seconds) : "–"; }

// 1, 2 or 5 times a power of ten (of two for bytes), so that about `count` of them make up `all`.
double tick(double all, int count, double base) {
  const double unit = std::pow(base, std::floor(std::log(all / count) / std::log(base)));
  for (double factor : {1., 2., 5., 10., 20., 50., 100., 200., 500., 1000.})
    if (all / (unit * factor) <= count) return unit * factor;
  return all;
}

class Page {
 public:
  Page(std::span<const PageRun> runs) : runs_(runs) {}

  std::string text(const std::string& title, const std::string& machine) {
    put("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<meta name=\"viewport\" "
        "content=\"width=device-width\">\n<title>Memory of {}</title>\n<style>{}</style></head><body>\n<h1>Memory of "
        "{}</h1>\n<p>{}</p>\n",
        escaped(title), kStyle, escaped(title), escaped(machine));
    if (runs_.size() > 1) {
      table();
      savings();
    }
    for (size_t i = 0; i < runs_.size(); ++i) details(runs_[i], i < 2);
    text_ += "</body></html>\n";
    return std::move(text_);
  }

 private:
  template <class... Values>
  void put(fmt::format_string<Values...> format, Values&&... values) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<Values>(values)...);
  }

  void key(std::initializer_list<std::pair<std::string_view, std::string_view>> entries) {
    text_ += "<div class=\"key\">";
    for (const auto& [color, name] : entries) put("<span><i style=\"background:{}\"></i>{}</span>", color, name);
    text_ += "</div>\n";
  }
  void key_of_roles() {
    text_ += "<div class=\"key\">";
    for (int r = 0; r < kRoles; ++r)
      put("<span><i style=\"background:{}\"></i>{}</span>", kRoleColors[r], readable(name_of(Role(r))));
    text_ += "</div>\n";
  }

  void table() {
    const bool measured = runs_[0].measured;
    put("<h2>At a glance</h2>\n<div class=\"wide\"><table><tr><th></th><th>device plan</th>{}<th>host plan</th>{}<th>"
        "NVMe</th><th>a step</th>{}<th>NVMe waits</th><th>copy waits</th><th>runs again</th>{}</tr>\n",
        measured ? "<th>measured</th>" : "", measured ? "<th>measured</th>" : "", measured ? "<th>ratio</th>" : "",
        measured ? "<th>loss</th>" : "");
    const auto cell = [&](const auto& value, auto&& show) {
      if (measured) put("<td>{}</td>", value ? show(*value) : "");
    };
    for (const PageRun& run : runs_) {
      const auto planned = [&](Tier tier) { return bytes_or_dash((*run.memory)[tier].total_bytes()); };
      put("<tr><td>{}</td><td>{}</td>", escaped(run.name), planned(Tier::device));
      cell(run.device_measured, bytes_or_dash);
      put("<td>{}</td>", planned(Tier::host));
      cell(run.host_measured, bytes_or_dash);
      put("<td>{}</td><td>{}</td>", planned(Tier::nvme), seconds_text(run.seconds));
      cell(run.ratio, [](double ratio) { return fmt::format("{:.2f}×", ratio); });
      put("<td>{}</td><td>{}</td><td>{}</td>", seconds_or_dash(run.stalls.storage()),
          seconds_or_dash(run.stalls.copies()), seconds_or_dash(run.stalls.restoring));
      cell(run.loss_difference, [](double d) { return d == 0 ? std::string("0") : fmt::format("{:+.1e}", d); });
      text_ += "</tr>\n";
    }
    text_ += "</table></div>\n";
  }

  // One bar a run and tier: what is alive at the peak by category, and what is lost between tensors.
  void savings() {
    text_ += "<h2>What each takes at its peak</h2>\n";
    key_of_roles();
    for (int t = 0; t < kTiers; ++t) {
      int64_t most = 0;
      for (const PageRun& run : runs_) most = std::max(most, run.memory->tiers[t].total_bytes());
      if (most == 0) continue;
      const int64_t first = runs_[0].memory->tiers[t].total_bytes();
      const auto shown = [&](const PageRun& run) { return first > 0 || run.memory->tiers[t].total_bytes() > 0; };
      const double left = 230, plot = kWidth - left - 160, row = 24;
      put("<h3>{} memory</h3>\n<p>{}</p>\n<svg viewBox=\"0 0 {} {}\" role=\"img\">\n", title_of(Tier(t)),
          first > 0 ? fmt::format("Shorter is better; the percentage compares with “{}”.", escaped(runs_[0].name))
                    : "What was moved off the device; runs that move nothing are left out.",
          kWidth, row * double(std::count_if(runs_.begin(), runs_.end(), shown)) + 6);
      double y = 4;
      for (const PageRun& run : runs_) {
        if (!shown(run)) continue;
        const TierPlan& tier = run.memory->tiers[t];
        put("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n", left - 8, y + 13, escaped(run.name));
        double x = left;
        for (int r = 0; r < kRoles; ++r) {
          const double width = plot * double(tier.at_peak[r]) / double(most);
          if (width > 0)
            put("<rect x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\"><title>{}: "
                "{}</title></rect>\n",
                x, y, width, row - 6, kRoleColors[r], readable(name_of(Role(r))), bytes_text(tier.at_peak[r]));
          x += width;
        }
        const double end = left + plot * double(tier.total_bytes()) / double(most);
        if (end - x > 0.5)
          put("<rect x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\" fill=\"none\" class=\"axis\"><title>lost "
              "between "
              "tensors: {}</title></rect>\n",
              x, y + 0.5, end - x, row - 7,
              bytes_text(tier.total_bytes() - tier.persistent_bytes - tier.live_peak_bytes));
        std::string label = bytes_text(tier.total_bytes());
        if (first > 0 && &run != &runs_[0])
          label += fmt::format("  ({:+.0f}%)", 100.0 * double(tier.total_bytes() - first) / double(first));
        put("<text x=\"{:.1f}\" y=\"{}\">{}</text>\n", std::max(x, end) + 8, y + 13, label);
        y += row;
      }
      text_ += "</svg>\n";
    }
  }

  static std::string title_of(Tier tier) {
    return tier == Tier::device ? "Device" : tier == Tier::host ? "Host" : "NVMe";
  }

  void details(const PageRun& run, bool open) {
    put("<details{}><summary>{}</summary>\n", open ? " open" : "", escaped(run.name));
    length_ = 0;
    for (const Span& span : run.spans) length_ = std::max(length_, span.finish);
    if (runs_.size() == 1) key_of_roles();
    for (int t = 0; t < kTiers; ++t)
      if (run.memory->tiers[t].total_bytes() > 0) memory_timeline(run, Tier(t));
    stream_timeline(run);
    text_ += "</details>\n";
  }

  double x_at(double seconds) const { return kLeft + kPlot * seconds / std::max(length_, 1e-9); }

  void time_axis(double y, double top) {
    const double step = tick(std::max(length_, 1e-9), 8, 10);
    for (int i = 0; double(i) * step <= length_; ++i)
      put("<line class=\"axis\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/><text class=\"soft\" "
          "x=\"{0:.1f}\" y=\"{3}\" text-anchor=\"middle\">{4}</text>\n",
          x_at(double(i) * step), top, y + 4, y + 17, i == 0 ? "0" : seconds_text(double(i) * step));
  }

  // Stacked by category over the step; each column shows the fullest moment of its share of the time.
  void memory_timeline(const PageRun& run, Tier tier) {
    const TierPlan& plan = (*run.memory)[tier];
    Ledger resting{};
    for (const Tensor& tensor : run.program->tensors)
      if (tensor.persistent && !tensor.part_of && tensor.home == tier) resting[int(tensor.role)] += tensor.bytes();
    const std::vector<Ledger> live = timeline(*run.program, *run.memory, tier);
    const auto sum = [](const Ledger& ledger) {
      int64_t bytes = 0;
      for (int64_t role : ledger) bytes += role;
      return bytes;
    };
    std::vector<Ledger> columns(kColumns);
    std::vector<bool> known(kColumns, false);
    double now = 0;
    int peak_column = 0;
    for (size_t i = 0; i < live.size(); ++i) {
      now = std::max(now, run.spans[i].start);  // what is alive follows the order of the program
      const int column = std::min(kColumns - 1, int(now / std::max(length_, 1e-9) * kColumns));
      if (!known[column] || sum(live[i]) > sum(columns[column])) columns[column] = live[i];
      known[column] = true;
      if (int32_t(i) == plan.peak_op) peak_column = column;
    }
    for (int c = 1; c < kColumns; ++c)
      if (!known[c]) columns[c] = columns[c - 1];

    constexpr double kTop = 22, kHeight = 170, kBottom = kTop + kHeight;
    const double most = std::max<double>(double(plan.total_bytes()), 1) * 1.02;
    const auto y_at = [&](int64_t bytes) { return kBottom - kHeight * double(bytes) / most; };
    put("<h3>{} memory over the step</h3>\n<p>{}</p>\n<svg viewBox=\"0 0 {} {}\" role=\"img\">\n", title_of(tier),
        caption(run, tier), kWidth, kBottom + 24);
    const double step = tick(most, 5, 1024);
    for (int i = 0; double(i) * step <= most; ++i)
      put("<line class=\"axis\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/><text class=\"soft\" x=\"{}\" "
          "y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
          kLeft, kWidth - kRight, y_at(int64_t(i * step)), y_at(int64_t(i * step)), kLeft - 6,
          y_at(int64_t(i * step)) + 4, i == 0 ? "0" : axis_bytes(int64_t(i * step)));
    std::vector<int64_t> below(kColumns, 0);
    for (int r = 0; r < kRoles; ++r) {
      bool any = false;
      std::vector<int64_t> above = below;
      for (int c = 0; c < kColumns; ++c) {
        above[c] += resting[r] + columns[c][r];
        any |= above[c] > below[c];
      }
      if (!any) continue;
      const auto x = [](int c) { return kLeft + kPlot * c / kColumns; };
      // Steps: horizontal to the column, then vertical to its height; back along the lower edge.
      std::string path = fmt::format("M{:.1f} {:.1f}", x(0), y_at(above[0]));
      for (int c = 1; c < kColumns; ++c)
        if (above[c] != above[c - 1]) path += fmt::format("H{:.1f}V{:.1f}", x(c), y_at(above[c]));
      path += fmt::format("H{:.1f}V{:.1f}", x(kColumns), y_at(below[kColumns - 1]));
      for (int c = kColumns - 1; c > 0; --c)
        if (below[c] != below[c - 1]) path += fmt::format("H{:.1f}V{:.1f}", x(c), y_at(below[c - 1]));
      put("<path d=\"{}Z\" fill=\"{}\"><title>{}</title></path>\n", path + fmt::format("H{:.1f}", x(0)), kRoleColors[r],
          readable(name_of(Role(r))));
      below = above;
    }
    time_axis(kBottom, kBottom);
    const double peak = kLeft + kPlot * (peak_column + 0.5) / kColumns;
    const bool right = peak > kWidth * 0.6;
    put("<line class=\"mark\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/><text x=\"{3:.1f}\" y=\"12\" "
        "text-anchor=\"{4}\">peak {5} at {6}</text>\n</svg>\n",
        peak, kTop - 6, kBottom, peak, right ? "end" : "start",
        bytes_text(plan.persistent_bytes + plan.live_peak_bytes), stage_at(run, plan.peak_op));
  }

  static std::string axis_bytes(int64_t bytes) {
    std::string text = bytes_text(bytes);
    if (const size_t zeros = text.find(".00"); zeros != std::string::npos) text.erase(zeros, 3);
    return text;
  }

  static std::string stage_at(const PageRun& run, int32_t op) {
    if (op < 0) return "rest";
    const Op& at = run.program->ops[size_t(op)];
    std::string text(name_of(at.stage));
    if (at.microbatch >= 0) text += fmt::format(", microbatch {}", at.microbatch);
    if (at.block >= 0) text += fmt::format(", block {}", at.block);
    return text;
  }

  static std::string caption(const PageRun& run, Tier tier) {
    const TierPlan& plan = (*run.memory)[tier];
    int most = 0;
    for (int r = 1; r < kRoles; ++r)
      if (plan.at_peak[r] > plan.at_peak[most]) most = r;
    const double share = 100.0 * double(plan.at_peak[most]) / double(plan.persistent_bytes + plan.live_peak_bytes);
    const std::string last = plan.peak_op >= 0 && plan.live_peak_bytes > 0 && tier != Tier::nvme
                                 ? fmt::format(" The peak is where op {} ({}) runs.", plan.peak_op,
                                               run.program->ops[size_t(plan.peak_op)].kind->name)
                                 : "";
    return fmt::format("{} of {} are {} ({:.0f}%).{}", bytes_text(plan.at_peak[most]),
                       bytes_text(plan.persistent_bytes + plan.live_peak_bytes), readable(name_of(Role(most))), share,
                       last);
  }

  static std::string_view color_of(const Op& op) {
    if (op.stream != Stream::compute && op.stream != Stream::host) return kMove;
    if (op.purpose != Purpose::work) return kAgain;
    return op.stage == Stage::forward ? kForward : op.stage == Stage::backward ? kBackward : kUpdate;
  }

  // What ran when on which stream. Neighbours of one colour with no visible gap between them are drawn as one.
  void stream_timeline(const PageRun& run) {
    struct Slice {
      double start, finish;
      std::string_view color;
      size_t first, count;
    };
    std::array<std::vector<Slice>, kStreams> slices;
    std::array<double, kStreams> busy{};
    const double gap = length_ / kPlot / 2;
    for (size_t i = 0; i < run.program->ops.size(); ++i) {
      const Op& op = run.program->ops[i];
      const Span& span = run.spans[i];
      auto& own = slices[int(op.stream)];
      busy[int(op.stream)] += span.finish - span.start;
      if (!own.empty() && own.back().color == color_of(op) && span.start - own.back().finish < gap) {
        own.back().finish = std::max(own.back().finish, span.finish);
        ++own.back().count;
      } else {
        own.push_back({span.start, span.finish, color_of(op), i, 1});
      }
    }
    const int rows = int(std::count_if(slices.begin(), slices.end(), [](const auto& s) { return !s.empty(); }));
    constexpr double kRow = 26;
    const double bottom = 8 + kRow * rows;
    const double stalled = length_ - busy[int(Stream::compute)];
    put("<h3>What ran when</h3>\n<p>{} step of {}; compute runs {:.0f}% of it. {} Hover over a piece for its "
        "figures.</p>\n",
        run.measured ? "Measured" : "Predicted", seconds_text(length_),
        100 * busy[int(Stream::compute)] / std::max(length_, 1e-9),
        stalled <= 0.01 * length_ ? (rows > 1 ? "Transfers hide behind it." : "")
                                  : "It waits where the top row is marked" + waits(run.stalls) + ".");
    key({{kForward, "forward"},
         {kBackward, "backward"},
         {kUpdate, "update"},
         {kAgain, "runs again, encodes, decodes"},
         {kMove, "moves bytes"},
         {kStall, "compute waits"}});
    put("<svg viewBox=\"0 0 {} {}\" role=\"img\">\n", kWidth, bottom + 24);
    time_axis(bottom, 4);
    double y = 8;
    for (int s = 0; s < kStreams; ++s) {
      if (slices[s].empty()) continue;
      put("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n", kLeft - 8, y + 14, readable(name_of(Stream(s))));
      double before = 0;
      for (const Slice& slice : slices[s]) {
        if (Stream(s) == Stream::compute && slice.start - before > gap)
          put("<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"20\" fill=\"{}\"><title>waits {} before {}"
              "</title></rect>\n",
              x_at(before), y, x_at(slice.start) - x_at(before), kStall, seconds_text(slice.start - before),
              escaped(what(run, slice.first)));
        before = slice.finish;
        put("<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"20\" fill=\"{}\"><title>{}{}, {} from {}</title>"
            "</rect>\n",
            x_at(slice.start), y, std::max(0.3, x_at(slice.finish) - x_at(slice.start)), slice.color,
            escaped(what(run, slice.first)), slice.count > 1 ? fmt::format(" and {} more", slice.count - 1) : "",
            seconds_text(slice.finish - slice.start), seconds_text(slice.start));
      }
      y += kRow;
    }
    text_ += "</svg>\n";
  }

  static std::string waits(const Stalls& stalls) {
    std::string text;
    if (stalls.storage() > 0) text += ", for NVMe " + seconds_text(stalls.storage());
    if (stalls.copies() > 0) text += ", for copies " + seconds_text(stalls.copies());
    return text;
  }

  static std::string what(const PageRun& run, size_t i) {
    const Op& op = run.program->ops[i];
    return std::string(op.kind->name) + (op.outputs.empty() ? "" : " → " + (*run.program)[op.outputs[0]].name);
  }

  std::span<const PageRun> runs_;
  std::string text_;
  double length_ = 0;  // of the step being drawn, in seconds
};

}  // namespace

std::string memory_page(const std::string& title, const std::string& machine, std::span<const PageRun> runs) {
  return Page(runs).text(title, machine);
}

}  // namespace strata
