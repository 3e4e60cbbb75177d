// Charts of logged figures; see run_page.h.
#include "engine/runtime/run_page.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "engine/planning/page_drawing.h"
#include "engine/runtime/log.h"

namespace strata {
namespace {

using namespace page;

constexpr double kHeight = 240, kTop = 16, kBottom = 34;
constexpr int kColumnsOfChart = 425;  // two units each
// Of Okabe and Ito, told apart by people who see few colours; more runs than these begin anew, dashed.
constexpr std::string_view kRunColors[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"};

std::string_view color_of(size_t run) { return kRunColors[run % std::size(kRunColors)]; }
std::string_view dash_of(size_t run) { return run < std::size(kRunColors) ? "" : " stroke-dasharray=\"6 3\""; }

struct Point {
  double x, y, low, high;  // the mean of a column, and the range it stands for
};

struct Line {
  size_t run;
  std::vector<Point> points;
  bool marks;  // few values: each is marked
};

struct Chart {
  std::string title, note;
  std::vector<std::string> names;  // of curves that are added up
  std::function<std::string(double)> figure;
  bool from_zero;
  bool marks = false;
};

std::string plain_figure(double value) { return fmt::format("{:.6g}", value); }
std::string large_figure(double value) {
  constexpr std::string_view units[] = {"", "k", "M", "G", "T"};
  size_t unit = 0;
  while (std::abs(value) >= 1000 && unit + 1 < std::size(units)) value /= 1000, ++unit;
  return fmt::format("{:.6g}{}", value, units[unit]);
}

// Of all runs: every chart has this axis.
struct Horizontal {
  Along along;
  double begin, end;
  double at(const RunHistory& run, size_t i) const {
    return along == Along::steps ? run.steps[i] : along == Along::tokens ? run.tokens[i] : run.seconds[i];
  }
  double x(double value) const { return kLeft + kPlot * (value - begin) / std::max(end - begin, 1e-9); }
};

Line line_of(const RunHistory& run, size_t number, const Chart& chart, const Horizontal& horizontal) {
  Line line{number, {}, chart.marks};
  std::vector<double> sums(run.steps.size(), 0);
  std::vector<bool> known(run.steps.size(), false);
  for (const std::string& name : chart.names)
    if (const Curve* curve = run.find(name)) {
      size_t at = 0;
      for (size_t i = 0; i < curve->steps.size(); ++i) {
        while (run.steps[at] < curve->steps[i]) ++at;
        sums[at] += curve->values[i], known[at] = true;
      }
    }
  const bool columns = run.steps.size() > kColumnsOfChart;
  double column = -1, count = 0;
  for (size_t i = 0; i < sums.size(); ++i) {
    if (!known[i]) continue;
    const double x = horizontal.x(horizontal.at(run, i));
    const double mine = columns ? std::floor((x - kLeft) / kPlot * kColumnsOfChart) : double(i);
    if (mine != column || line.points.empty()) {
      line.points.push_back({x, sums[i], sums[i], sums[i]});
      column = mine, count = 1;
      continue;
    }
    Point& point = line.points.back();
    point.y += (sums[i] - point.y) / ++count;
    point.low = std::min(point.low, sums[i]), point.high = std::max(point.high, sums[i]);
  }
  return line;
}

struct Vertical {
  double low, high, beyond;  // the frame's, and the largest value of all
  double y(double value) const {
    return kTop + (kHeight - kTop - kBottom) * (1 - (std::clamp(value, low, high) - low) / (high - low));
  }
};

// A few values far above all others (a loss at the start, a gradient that jumped) do not flatten the rest.
Vertical vertical_of(const std::vector<Line>& lines, bool from_zero) {
  std::vector<double> lows, highs;
  for (const Line& line : lines)
    for (const Point& point : line.points) lows.push_back(point.low), highs.push_back(point.high);
  std::sort(highs.begin(), highs.end());
  const double most = highs.back(), usual = highs[(highs.size() - 1) * 98 / 100];
  const double low = from_zero ? std::min(0.0, *std::min_element(lows.begin(), lows.end()))
                               : *std::min_element(lows.begin(), lows.end());
  double high = most - low > 3 * (usual - low) && usual > low ? usual + 0.2 * (usual - low) : most;
  if (high <= low) high = low + std::max(std::abs(low), 1e-9) * 0.1;
  const double step = round_step(high - low, 5);
  return {std::floor(low / step) * step, std::ceil(high / step * (1 - 1e-12)) * step, most};
}

void draw_axes(Text& text, const Chart& chart, const Horizontal& horizontal, const Vertical& vertical) {
  const double step = round_step(vertical.high - vertical.low, 5);
  const int count = int(std::lround((vertical.high - vertical.low) / step));
  for (int i = 0; i <= count; ++i) {
    const double value = vertical.low + step * i;
    text.put(
        "<line class=\"axis\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/><text class=\"soft\" x=\"{}\" "
        "y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
        kLeft, kLeft + kPlot, vertical.y(value), vertical.y(value), kLeft - 6, vertical.y(value) + 4,
        chart.figure(std::abs(value) < step * 1e-6 ? 0 : value));
  }
  const double across = round_step(horizontal.end - horizontal.begin, 10);
  for (double at = std::ceil(horizontal.begin / across) * across; at <= horizontal.end * (1 + 1e-9); at += across) {
    const std::string label = horizontal.along == Along::seconds ? duration_text(at) : large_figure(at);
    text.put("<text class=\"soft\" x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", horizontal.x(at),
             kHeight - kBottom + 17, label);
  }
}

void draw_line(Text& text, const Line& line, const RunHistory& run, const Vertical& vertical) {
  const std::string_view color = color_of(line.run);
  std::string path, band;
  for (const Point& point : line.points) {
    path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? 'M' : 'L', point.x, vertical.y(point.y));
    band += fmt::format("{}{:.1f} {:.1f}", band.empty() ? 'M' : 'L', point.x, vertical.y(point.high));
  }
  if (std::any_of(line.points.begin(), line.points.end(), [](const Point& point) { return point.high > point.low; })) {
    for (auto point = line.points.rbegin(); point != line.points.rend(); ++point)
      band += fmt::format("L{:.1f} {:.1f}", point->x, vertical.y(point->low));
    text.put("<path d=\"{}Z\" fill=\"{}\" fill-opacity=\".18\"/>\n", band, color);
  }
  text.put("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.6\"{}><title>{}</title></path>\n", path, color,
           dash_of(line.run), escaped(run.name));
  if (line.marks || line.points.size() == 1)
    for (const Point& point : line.points)
      text.put("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2.6\" fill=\"{}\"/>\n", point.x, vertical.y(point.y), color);
}

void draw(Text& text, const Chart& chart, std::span<const RunHistory> runs, const Horizontal& horizontal) {
  std::vector<Line> lines;
  for (size_t r = 0; r < runs.size(); ++r)
    if (Line line = line_of(runs[r], r, chart, horizontal); !line.points.empty()) lines.push_back(std::move(line));
  if (lines.empty()) return;
  const Vertical vertical = vertical_of(lines, chart.from_zero);
  text.put("<h2>{}</h2>\n<p>{}{}</p>\n<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n", chart.title,
           chart.note,
           vertical.beyond > vertical.high * (1 + 1e-9)
               ? fmt::format(" The largest value, {}, lies beyond the frame.", chart.figure(vertical.beyond))
               : "",
           kWidth, kHeight, chart.title);
  draw_axes(text, chart, horizontal, vertical);
  for (const Line& line : lines) draw_line(text, line, runs[line.run], vertical);
  text.put("</svg>\n");
}

std::string cell(double value, const std::function<std::string(double)>& figure) {
  return "<td>" + (std::isnan(value) ? std::string("–") : figure(value)) + "</td>";
}

void table(Text& text, std::span<const RunHistory> runs) {
  text.put(
      "<div class=\"wide\"><table><tr><th>run</th><th>steps</th><th>tokens</th><th>time in steps</th><th>last "
      "loss</th><th>last validation loss</th><th>least</th><th>median tokens/s</th><th>most memory</th></tr>\n");
  const auto loss = [](double value) { return fmt::format("{:.4f}", value); };
  for (size_t r = 0; r < runs.size(); ++r) {
    const RunHistory& run = runs[r];
    text.put(
        "<tr><td><svg style=\"display:inline-block;width:1.6em;height:.6em\" viewBox=\"0 0 16 6\"><path "
        "d=\"M0 3H16\" stroke=\"{}\" stroke-width=\"3\"{}/></svg> {}</td><td>{}</td><td>{}</td><td>{}</td>",
        color_of(r), dash_of(r), escaped(run.name), plain_figure(run.steps.back()),
        large_figure(std::round(run.tokens.back())), duration_text(run.seconds.back()));
    text.put("{}{}{}{}{}</tr>\n", cell(run.last("loss"), loss), cell(run.last("validation_loss"), loss),
             cell(run.least("validation_loss"), loss),
             cell(run.median("tokens_per_second"), [](double rate) { return fmt::format("{:.0f}", rate); }),
             cell(run.most("memory_bytes"), [](double bytes) { return bytes_text(int64_t(bytes)); }));
  }
  text.put("</table></div>\n");
}

std::vector<Chart> charts() {
  const auto seconds = [](double value) { return tick_seconds(value); };
  return {
      {"Loss", "In training, nats a token.", {"loss"}, plain_figure, false},
      {"Validation loss", "Nats a token.", {"validation_loss"}, plain_figure, false, true},
      {"Gradient norm", "Before it is clipped.", {"gradient_norm"}, plain_figure, true},
      {"Learning rate", "As a factor of each plugin's learning_rate.", {"learning_rate_factor"}, plain_figure, true},
      {"Loss scale", "Of 16-bit gradients.", {"loss_scale"}, large_figure, true},
      {"Tokens a second", "Of all ranks.", {"tokens_per_second"}, large_figure, true},
      {"Memory", "Resident memory of rank 0's process after the step.", {"memory_bytes"}, tick_bytes, true},
      {"Stalls",
       "Seconds of a step that rank 0's compute waited for NVMe, copies and other ranks, or spent on restoring.",
       {"waiting_for_nvme", "waiting_for_copies", "waiting_for_ranks", "restoring"},
       seconds,
       true},
  };
}

}  // namespace

std::string run_page(std::span<const RunHistory> runs, Along along) {
  Horizontal horizontal{along, std::numeric_limits<double>::infinity(), 0};
  for (const RunHistory& run : runs) {
    horizontal.begin = std::min(horizontal.begin, along == Along::steps ? run.steps.front() : 0);
    horizontal.end = std::max(horizontal.end, horizontal.at(run, run.steps.size() - 1));
  }
  Text text;
  constexpr std::string_view kNames[] = {"steps", "tokens", "seconds spent in steps"};
  text.put("{}<h1>Runs</h1>\n<p>Horizontally: {}.</p>\n", page_head("Runs"), kNames[size_t(along)]);
  table(text, runs);
  for (const Chart& chart : charts()) draw(text, chart, runs, horizontal);
  text.put("</body></html>\n");
  return text.take();
}

}  // namespace strata
