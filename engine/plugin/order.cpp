// Stable topological sort of plugins by capabilities; see order.h.
#include "engine/plugin/order.h"

#include <algorithm>
#include <iterator>

namespace strata {
namespace {

bool holds(const std::vector<std::string>& list, std::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

// Why the first cannot work beside the second; empty: it can.
std::string conflict(const NamedPlugin& first, const Capabilities& of_first, const NamedPlugin& second,
                     const Capabilities& of_second) {
  for (const Conflict& conflict : of_first.conflicts)
    if (holds(of_second.provides, conflict.capability))
      return "plugins \"" + first.name + "\" and \"" + second.name +
             "\" cannot work together: the first conflicts with \"" + conflict.capability +
             "\", which the second provides, because " + conflict.reason + ".";
  return "";
}

// The same beside what the configuration provides.
std::string conflict(const NamedPlugin& named, const Capabilities& capabilities, const Provided& by_run) {
  for (const Conflict& conflict : capabilities.conflicts)
    if (conflict.capability == by_run.capability)
      return "plugin \"" + named.name + "\" cannot work with " + by_run.said + ", because " + conflict.reason + ".";
  return "";
}

// What a run, or each gradient, has one of.
struct Single {
  std::string_view capability, of;
};
constexpr Single kSingles[] = {{"model", "a run has one model"},
                               {"optimizer", "a run has one optimizer"},
                               {"form of gradients", "a gradient crosses between ranks in one form"}};

}  // namespace

std::vector<Provided> provided_by_run(bool reproducible, const std::vector<std::string>& axes) {
  std::vector<Provided> provided;
  if (!reproducible) return provided;
  provided.push_back({"reproducible sums", "run.reproducible"});
  for (const std::string& axis : axes)
    provided.push_back({"reproducible sums over " + axis, "run.reproducible and mesh." + axis + " above 1"});
  return provided;
}

std::vector<NamedPlugin> in_order(const std::vector<NamedPlugin>& plugins, const std::vector<Provided>& by_run) {
  std::vector<Capabilities> capabilities;
  for (const NamedPlugin& named : plugins) capabilities.push_back(named.plugin->capabilities());
  const size_t count = plugins.size();
  for (size_t i = 0; i < count; ++i) {
    for (const std::string& needed : capabilities[i].requires_)
      if (std::none_of(capabilities.begin(), capabilities.end(),
                       [&](const Capabilities& c) { return holds(c.provides, needed); }))
        throw Error("plugin \"" + plugins[i].name + "\" requires \"" + needed +
                    "\", which no enabled plugin provides.");
    for (size_t j = 0; j < count; ++j)
      if (const std::string why = conflict(plugins[i], capabilities[i], plugins[j], capabilities[j]);
          i != j && !why.empty())
        throw Error(why);
    for (const Provided& provided : by_run)
      if (const std::string why = conflict(plugins[i], capabilities[i], provided); !why.empty()) throw Error(why);
  }
  const auto before = [&](size_t a, size_t b) {  // a must run before b
    const auto gives = [&](const std::string& needed) { return holds(capabilities[a].provides, needed); };
    const Capabilities& c = capabilities[b];
    return a != b && (std::any_of(c.requires_.begin(), c.requires_.end(), gives) ||
                      std::any_of(c.after.begin(), c.after.end(), gives));
  };
  std::vector<NamedPlugin> ordered;
  std::vector<char> done(count, false);
  while (ordered.size() < count) {
    size_t next = count;
    for (size_t i = 0; i < count; ++i) {
      if (done[i] || (next < count && (capabilities[next].early || !capabilities[i].early))) continue;
      bool ready = true;
      for (size_t j = 0; j < count; ++j) ready &= done[j] || !before(j, i);
      if (ready) next = i;
    }
    if (next == count) {
      // Those that only wait for the circle are not part of it: nothing that is left waits for them.
      for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = 0; i < count; ++i) {
          bool awaited = false;
          for (size_t j = 0; j < count; ++j) awaited |= !done[j] && before(i, j);
          if (!done[i] && !awaited) done[i] = changed = true;
        }
      }
      std::string names;
      for (size_t i = 0; i < count; ++i)
        if (!done[i]) names += (names.empty() ? "\"" : ", \"") + plugins[i].name + "\"";
      throw Error("the requirements of the plugins " + names + " go in a circle, so none of them can run first.");
    }
    done[next] = true;
    ordered.push_back(plugins[next]);
  }
  return ordered;
}

namespace {

constexpr std::string_view kReasons[] = {
    "two plugins for one thing: a parameter has one update, a gradient is summed once and crosses in one form",
    "run.reproducible promises the bits of one rank, and what an exchange leaves out, for later, or apart depends on "
    "which rank has what",
    "run.reproducible promises the bits of one rank, and a sum that ranks divide is taken in another order",
    "one plugin needs whole what another divides among ranks"};

size_t reason_of(const std::string& capability) {
  const bool reproducible = capability.starts_with("reproducible sums");
  if (reproducible) return capability == "reproducible sums" || capability == "reproducible sums over data" ? 1 : 2;
  return capability.starts_with("splits over ") ? 3 : 0;
}

std::string listed(const std::vector<std::string>& names, const char* last) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) text += (i == 0 ? "" : i + 1 < names.size() ? ", " : last) + names[i];
  return text;
}

// Cases, those with the same words of the other side and the same reason together.
class Cases {
 public:
  void add(const std::string& name, const std::string& with, const std::string& why) {
    for (Case& one : cases_)
      if (one.with == with && one.why == why) return one.names.push_back(name);
    cases_.push_back({{name}, with, why});
  }
  std::vector<std::string> texts() const {
    std::vector<std::string> all;
    for (const Case& one : cases_)
      all.push_back(listed(one.names, ", ") + (one.with.empty() ? "" : " " + one.with) +
                    (one.why.empty() ? "" : ": " + one.why));
    return all;
  }

 private:
  struct Case {
    std::vector<std::string> names;
    std::string with, why;
  };
  std::vector<Case> cases_;
};

}  // namespace

std::vector<Refusal> refusals(const std::vector<NamedPlugin>& plugins, const std::vector<NamedPlugin>& modes) {
  Cases cases[std::size(kReasons)];
  for (const Single& single : kSingles) {
    std::vector<std::string> names;
    for (const NamedPlugin& named : plugins)
      if (holds(named.plugin->capabilities().provides, single.capability)) names.push_back(named.name);
    if (names.size() > 1) cases[0].add(listed(names, " or "), "", std::string(single.of));
  }
  std::vector<NamedPlugin> firsts = plugins;
  firsts.insert(firsts.end(), modes.begin(), modes.end());
  const std::vector<Provided> by_run = provided_by_run(true, {"data", "pipeline", "sequence", "tensor"});
  const auto holds_conflict = [](const NamedPlugin& named, const Conflict& conflict) {
    const std::vector<Conflict> all = named.plugin->capabilities().conflicts;
    return std::any_of(all.begin(), all.end(),
                       [&](const Conflict& other) { return other.capability == conflict.capability; });
  };
  for (const NamedPlugin& first : firsts)
    for (const Conflict& conflict : first.plugin->capabilities().conflicts) {
      const size_t reason = reason_of(conflict.capability);
      std::vector<std::string> others;
      for (const NamedPlugin& second : plugins) {
        const bool same = second.name == first.name.substr(0, first.name.find(' '));
        // What conflicts with what it provides itself is told once of two that do.
        const bool told = second.name < first.name && holds_conflict(second, conflict) &&
                          holds(first.plugin->capabilities().provides, conflict.capability);
        if (!same && !told && holds(second.plugin->capabilities().provides, conflict.capability))
          others.push_back(second.name);
      }
      if (!others.empty()) cases[reason].add(first.name, "with " + listed(others, " or "), conflict.reason);
      for (const Provided& provided : by_run)
        if (provided.capability == conflict.capability) {
          const size_t and_axis = provided.said.find(" and ");
          cases[reason].add(first.name,
                            and_axis == std::string::npos ? "" : "with " + provided.said.substr(and_axis + 5),
                            conflict.reason);
        }
    }
  std::vector<Refusal> all;
  for (size_t r = 0; r < std::size(kReasons); ++r)
    if (std::vector<std::string> texts = cases[r].texts(); !texts.empty())
      all.push_back({std::string(kReasons[r]), std::move(texts)});
  return all;
}

void require_exactly_one(const std::vector<NamedPlugin>& plugins, std::string_view capability,
                         std::string_view remedy) {
  std::string names;
  int count = 0;
  for (const NamedPlugin& named : plugins)
    if (holds(named.plugin->capabilities().provides, capability)) {
      names += (count ? ", \"" : "\"") + named.name + "\"";
      ++count;
    }
  if (count == 0)
    throw Error("no enabled plugin provides the " + std::string(capability) + "; " + std::string(remedy) + ".");
  if (count > 1)
    throw Error("the plugins " + names + " each provide the " + std::string(capability) + "; enable only one of them.");
}

}  // namespace strata
