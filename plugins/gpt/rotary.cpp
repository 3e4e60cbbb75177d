// Scalings of rotary positions; see rotary.h. Numbers of turns are counted over the original context.
#include "plugins/gpt/rotary.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numbers>

namespace {

constexpr double kTurn = 2 * std::numbers::pi;

// Which pairs keep their angles: `keep` + `by_frequency`·f(i) + `by_index`·i of them, cut to 0 to 1.
struct Kept {
  double keep = 0, by_frequency = 0, by_index = 0;
};

// Llama 3.1: by the turns of a pair, linearly from rotary_low turns (stretched) to rotary_high (kept).
Kept by_turns(const GptConfig& c) {
  const double range = c.rotary_high - c.rotary_low;
  return {-c.rotary_low / range, double(c.rotary_original_context) / (kTurn * range), 0};
}

// YaRN: the same border as numbers of pairs, rounded outwards, and linear in those.
Kept by_pairs(const GptConfig& c) {
  const double size = double(rotary_size_of(c));
  const auto pair_of = [&](double turns) {
    return size * std::log(double(c.rotary_original_context) / (turns * kTurn)) / (2 * std::log(c.rotary_base));
  };
  const double first = std::max(std::floor(pair_of(c.rotary_high)), 0.0);
  double last = std::min(std::ceil(pair_of(c.rotary_low)), size - 1);
  if (first == last) last += 0.001;  // as published implementations have it
  return {1 + first / (last - first), 0, -1 / (last - first)};
}

// "Dynamic NTK": another base, from the length of the sequences that there are.
double dynamic_base(const GptConfig& c, int64_t sequence_length) {
  const double size = double(rotary_size_of(c)), longer = double(sequence_length) / double(c.rotary_original_context);
  return c.rotary_base * std::pow(c.rotary_factor * std::max(longer, 1.0) - (c.rotary_factor - 1), size / (size - 2));
}

// As the attribute of the op: exact, with commas between.
std::string list_of(const std::vector<double>& numbers) {
  std::string text;
  for (const double number : numbers) {
    char digits[32];
    text += (text.empty() ? "" : ",") + std::string(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
  }
  return text;
}

}  // namespace

double usual_amplitude(const std::string& scaling, double factor, int64_t original) {
  if (factor <= 1) return 1;
  if (scaling == "longrope") return std::sqrt(1 + std::log(factor) / std::log(double(original)));
  return scaling == "yarn" ? 0.1 * std::log(factor) + 1 : 1;
}

void set_rotary(const GptConfig& c, bool local, int64_t sequence_length, strata::Attributes& attributes) {
  const bool plain = c.rotary_scaling == "none" || (local && c.local_rotary_base > 0);
  double base = local && c.local_rotary_base > 0 ? c.local_rotary_base : c.rotary_base;
  if (!plain && c.rotary_scaling == "dynamic") base = dynamic_base(c, sequence_length);
  attributes.set("base", base);
  if (rotary_size_of(c) != c.head_size) attributes.set("rotated", c.rotary_size);
  if (plain) return;
  if (c.rotary_scaling == "longrope")
    attributes.set("divisors", list_of(sequence_length > c.rotary_original_context ? c.rotary_long : c.rotary_short));
  else if (c.rotary_scaling != "dynamic")
    attributes.set("factor", c.rotary_factor);
  const Kept kept = c.rotary_scaling == "llama3" ? by_turns(c) : c.rotary_scaling == "yarn" ? by_pairs(c) : Kept{};
  for (const auto& [name, value] :
       {std::pair{"keep", kept.keep}, {"keep_by_frequency", kept.by_frequency}, {"keep_by_index", kept.by_index}})
    if (value != 0) attributes.set(name, value);
  const double amplitude = c.rotary_amplitude > 0
                               ? c.rotary_amplitude
                               : usual_amplitude(c.rotary_scaling, c.rotary_factor, c.rotary_original_context);
  if (amplitude != 1) attributes.set("amplitude", amplitude);
}
