// See strata/pattern.h.
#include "strata/pattern.h"

#include <vector>

namespace strata {

// Where text after a star does not fit, the last star takes one character more: no pattern takes longer than its length
// times that of the name.
bool matches(std::string_view pattern, std::string_view name) {
  size_t p = 0, n = 0, star = pattern.npos, after_star = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*')
      star = p++, after_star = n;
    else if (p < pattern.size() && pattern[p] == name[n])
      ++p, ++n;
    else if (star != pattern.npos)
      p = star + 1, n = ++after_star;
    else
      return false;
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

std::string parameter_name(const Program& program, TensorId parameter) {
  const Tensor& whole = program[program.whole(parameter)];
  return whole.lasting->rounded_from.empty() ? whole.name : whole.lasting->rounded_from;
}

std::string names_like(const Program& program) {
  const std::vector<TensorId> all = program.with_role(Role::parameter);
  if (all.empty()) return ".";
  return ", whose parameters have names as " + parameter_name(program, all.front()) + " and " +
         parameter_name(program, all.back()) + ".";
}

}  // namespace strata
