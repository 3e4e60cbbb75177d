// What all drawings of the pages share: text that HTML takes, figures for people, axes with round ticks, colours.
#pragma once
#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/planning/page.h"

namespace strata::page {

inline constexpr double kWidth = 960, kLeft = 90, kRight = 20;  // of every drawing, in its own units
inline constexpr double kPlot = kWidth - kLeft - kRight;

// One colour, one meaning. Roles have those of Okabe and Ito, told apart by people who see few colours; what ops do has
// violets, brown and greens that no role has.
inline constexpr std::string_view kRoleColors[kRoles] = {"#0072b2", "#e69f00", "#009e73", "#56b4e9",
                                                         "#999999", "#f0e442", "#cc79a7"};
inline constexpr std::string_view kForward = "#c9b8ea", kBackward = "#8a63c9", kUpdate = "#4b2c82", kAgain = "#8c564b",
                                  kMove = "#8fbc5a", kStall = "#d55e00", kLost = "#dddddd";

std::string page_head(std::string_view title);  // of an HTML page, to the beginning of its body
std::string escaped(std::string_view text);
std::string readable(std::string_view name);  // "optimizer_state" -> "optimizer state"
std::string seconds_text(double seconds);
std::string title_of(const PageRun& run, Tier tier);  // "Device memory", "Memory"

// 1, 2 or 5 times a power of ten, so that at most `count` steps make up `all`.
double round_step(double all, int count);
// A power of two bytes, so that at most `count` steps make up `all`: 256 MiB, 512 MiB, 768 MiB, 1 GiB.
double round_bytes(double all, int count);
std::string tick_seconds(double seconds);  // "0.2 s", "50 ms"
std::string tick_bytes(double bytes);      // "1.5 GiB", "0"

// HTML or SVG that is being written.
class Text {
 public:
  template <class... Values>
  void put(fmt::format_string<Values...> format, Values&&... values) {
    text_ += fmt::format(format, std::forward<Values>(values)...);
  }
  void key(const std::vector<std::pair<std::string_view, std::string>>& entries);  // colours with their meaning
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

// Bytes by role that rest in a tier all the step.
Ledger resting(const PageRun& run, Tier tier);
double length_of(const PageRun& run);  // seconds to the last op's end
int64_t budget_of(const PageRun& run, Tier tier);

// The roles that any of the runs has bytes of, with their colours.
std::vector<std::pair<std::string_view, std::string>> roles_of(std::span<const PageRun> runs);

// Where a stacked timeline of a tier goes.
struct Frame {
  double left, top, width, height;
  double seconds;  // that its width stands for
  double bytes;    // that its height stands for
  double y(double bytes_at) const { return top + height * (1 - bytes_at / bytes); }
  double x(double at) const { return left + width * at / seconds; }
};
// The paths of one run by role, one above the other; returns the column of the peak, of kColumns.
inline constexpr int kColumns = 600;
int stacked(Text& text, const PageRun& run, Tier tier, const Frame& frame);
// Horizontal lines at round bytes, with their text where `labels`.
void byte_axis(Text& text, const Frame& frame, int count, bool labels);
void time_axis(Text& text, const Frame& frame, int count);
// The budget as a line, where there is one that the frame reaches.
void budget_line(Text& text, int64_t budget, const Frame& frame);

// Parts of the page.
void summary(Text& text, std::span<const PageRun> runs);  // table, conclusion, memory against time
void peaks(Text& text, std::span<const PageRun> runs);    // bars of what each takes
void memory_timeline(Text& text, const PageRun& run, Tier tier);
void stream_timeline(Text& text, const PageRun& run);
void stages_timeline(Text& text, std::span<const PageRun> runs, int clock);  // compute of each, one row each

}  // namespace strata::page
