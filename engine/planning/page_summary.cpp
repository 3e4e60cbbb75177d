// What the runs say together: the table, sentences, memory against time; see page_drawing.h.
#include <algorithm>
#include <cmath>

#include "engine/planning/page_drawing.h"

namespace strata {
namespace {

int64_t device_bytes(const PageRun& run) { return run.memory->device().total_bytes(); }

// Whether b takes clearly less of one thing and no more of the other: times within 3% are equal.
bool dominated(const PageRun& a, const PageRun& b) {
  const bool less_memory = double(device_bytes(b)) < 0.99 * double(device_bytes(a)),
             less_time = b.seconds < 0.97 * a.seconds;
  const bool as_much_memory = device_bytes(b) <= device_bytes(a), as_much_time = b.seconds <= 1.03 * a.seconds;
  return (less_memory && as_much_time) || (less_time && as_much_memory);
}

std::string compared(const PageRun& run, const PageRun& plain) {
  return fmt::format("{} of {}, {:.0f}% of what {} takes, for {:.2f} × its time", bytes_text(device_bytes(run)),
                     memory_name(*run.program, Tier::device),
                     100.0 * double(device_bytes(run)) / double(std::max<int64_t>(device_bytes(plain), 1)), plain.name,
                     run.seconds / std::max(plain.seconds, 1e-12));
}

}  // namespace

std::vector<std::string> conclusions(std::span<const PageRun> runs) {
  std::vector<std::string> sentences;
  if (runs.size() < 2) return sentences;
  const PageRun& plain = runs[0];
  const auto fewer = [](const PageRun& a, const PageRun& b) { return device_bytes(a) < device_bytes(b); };
  const PageRun& least = *std::min_element(runs.begin(), runs.end(), fewer);
  if (device_bytes(least) < device_bytes(plain))
    sentences.push_back("Least memory: " + least.name + ", " + compared(least, plain) + ".");
  else
    sentences.push_back("Nothing takes less " + memory_name(*plain.program, Tier::device) + " than " + plain.name +
                        ".");
  const PageRun* cheap = nullptr;
  for (const PageRun& run : runs.subspan(1))
    if (run.seconds <= 1.1 * plain.seconds && device_bytes(run) < device_bytes(plain) && (!cheap || fewer(run, *cheap)))
      cheap = &run;
  if (cheap && cheap != &least)
    sentences.push_back("Least memory in at most 1.1 × the time: " + cheap->name + ", " + compared(*cheap, plain) +
                        ".");
  else if (!cheap)
    sentences.push_back("No saving costs less than a tenth of the time.");
  std::string worse;
  for (const PageRun& run : runs.subspan(1))
    if (std::any_of(runs.begin(), runs.end(), [&](const PageRun& other) { return dominated(run, other); }))
      worse += (worse.empty() ? "" : ", ") + run.name;
  if (!worse.empty()) sentences.push_back("Here another is at least as small and as fast as: " + worse + ".");
  if (const int64_t budget = plain.budgets[int(Tier::device)]; budget > 0) {
    std::string fit;
    for (const PageRun& run : runs)
      if (device_bytes(run) <= budget) fit += (fit.empty() ? "" : ", ") + run.name;
    sentences.push_back("In the budget of " + bytes_text(budget) + " fit: " + (fit.empty() ? "none" : fit) + ".");
  }
  return sentences;
}

namespace page {
namespace {

std::string bytes_or_dash(int64_t bytes) { return bytes > 0 ? bytes_text(bytes) : "–"; }
std::string seconds_or_dash(double seconds) { return seconds > 0 ? seconds_text(seconds) : "–"; }

void table(Text& text, std::span<const PageRun> runs) {
  const bool measured = runs[0].measured;
  const auto only_measured = [&](const char* head) { return measured ? fmt::format("<th>{}</th>", head) : ""; };
  text.put(
      "<h2>At a glance</h2>\n<div class=\"wide\"><table><tr><th></th><th>{} plan</th>{}<th>host plan</th>{}<th>"
      "NVMe</th><th>a step</th>{}<th>NVMe waits</th><th>copy waits</th><th>runs again</th>{}</tr>\n",
      runs[0].program->one_memory ? "memory" : "device", only_measured("measured"), only_measured("measured"),
      only_measured("fastest – slowest</th><th>ratio"), only_measured("loss"));
  const auto cell = [&](const auto& value, auto&& show) {
    if (measured) text.put("<td>{}</td>", value ? show(*value) : "");
  };
  for (size_t i = 0; i < runs.size(); ++i) {
    const PageRun& run = runs[i];
    const auto planned = [&](Tier tier) { return bytes_or_dash((*run.memory)[tier].total_bytes()); };
    text.put("<tr><td>{} {}</td><td>{}</td>", i + 1, escaped(run.name), planned(Tier::device));
    cell(run.device_measured, bytes_or_dash);
    text.put("<td>{}</td>", planned(Tier::host));
    cell(run.host_measured, bytes_or_dash);
    text.put("<td>{}</td><td>{}</td>", planned(Tier::nvme), seconds_text(run.seconds));
    if (measured) text.put("<td>{} – {}</td>", seconds_or_dash(run.fastest), seconds_or_dash(run.slowest));
    cell(run.ratio, [](double ratio) { return fmt::format("{:.2f}×", ratio); });
    text.put("<td>{}</td><td>{}</td><td>{}</td>", seconds_or_dash(run.stalls.storage()),
             seconds_or_dash(run.stalls.copies()), seconds_or_dash(run.stalls.restoring));
    cell(run.loss_difference, [](double d) { return d == 0 ? std::string("0") : fmt::format("{:+.1e}", d); });
    text.put("</tr>\n");
  }
  text.put("</table></div>\n");
  if (measured)
    text.put(
        "<p>A step is the median of its steps after the first. The loss is the difference from “{}” after the last "
        "step, where both train with one optimizer at one learning rate.</p>\n",
        escaped(runs[0].name));
}

// Memory to the right, time upwards: the nearer to the corner the better. Runs by their number in the table.
void against_time(Text& text, std::span<const PageRun> runs) {
  double most = 1, longest = 1e-9;
  for (const PageRun& run : runs) {
    most = std::max(most, double(device_bytes(run)));
    longest = std::max({longest, run.seconds, run.slowest});
  }
  const double bytes_step = round_bytes(most, 8), seconds_step = round_step(longest, 6);
  const double right = std::ceil(most / bytes_step) * bytes_step,
               top = std::ceil(longest / seconds_step) * seconds_step;
  const double height = 260, above = 12, bottom = above + height;
  const auto x = [&](double bytes) { return kLeft + (kPlot - 20) * bytes / right; };
  const auto y = [&](double seconds) { return bottom - height * seconds / top; };
  text.put(
      "<h2>Memory against time</h2>\n<p>Each dot is a run, by its number in the table; the line from it goes from its "
      "fastest to its slowest step. Filled dots: no other run is smaller and as fast, or faster and as small.</p>\n"
      "<svg viewBox=\"0 0 {} {}\" role=\"img\">\n",
      kWidth, bottom + 40);
  for (double at = 0; at <= top * 1.0001; at += seconds_step)
    text.put(
        "<line class=\"axis\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/><text class=\"soft\" x=\"{}\" "
        "y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
        kLeft, x(right), y(at), y(at), kLeft - 6, y(at) + 4, tick_seconds(at));
  for (double at = 0; at <= right * 1.0001; at += bytes_step)
    text.put(
        "<line class=\"axis\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/><text class=\"soft\" x=\"{0:.1f}\" "
        "y=\"{3}\" text-anchor=\"middle\">{4}</text>\n",
        x(at), bottom, bottom + 4, bottom + 17, tick_bytes(at));
  text.put("<text class=\"soft\" x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}; a step takes upwards</text>\n",
           (kLeft + x(right)) / 2, bottom + 34, memory_name(*runs[0].program, Tier::device));
  if (const int64_t budget = budget_of(runs[0], Tier::device); budget > 0 && double(budget) <= right)
    text.put(
        "<line class=\"budget\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/><text x=\"{3:.1f}\" y=\"{4}\">"
        "budget {5}</text>\n",
        x(double(budget)), above, bottom, x(double(budget)) + 4, above + 10, bytes_text(budget));
  for (size_t i = 0; i < runs.size(); ++i) {
    const PageRun& run = runs[i];
    const bool best = std::none_of(runs.begin(), runs.end(), [&](const PageRun& o) { return dominated(run, o); });
    const double at = x(double(device_bytes(run)));
    if (run.slowest > 0)
      text.put("<line class=\"spread\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\"/>\n", at,
               y(run.fastest), y(run.slowest));
    text.put(
        "<circle class=\"{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\"><title>{}: {}, {}</title></circle><text x=\"{:.1f}\" "
        "y=\"{:.1f}\">{}</text>\n",
        best ? "best" : "other", at, y(run.seconds), escaped(run.name), bytes_text(device_bytes(run)),
        seconds_text(run.seconds), at + 7, y(run.seconds) - 5, i + 1);
  }
  text.put("</svg>\n");
}

}  // namespace

void summary(Text& text, std::span<const PageRun> runs) {
  table(text, runs);
  text.put("<h2>What follows</h2>\n<ul>\n");
  for (const std::string& sentence : conclusions(runs)) text.put("<li>{}</li>\n", escaped(sentence));
  text.put("</ul>\n");
  against_time(text, runs);
}

}  // namespace page
}  // namespace strata
