// Renders options; see schema.h.
#include "engine/plugin/schema.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/config/sections.h"
#include "engine/plugin/loader.h"
#include "strata/json.h"

namespace strata {
namespace {

Json option_schema(const Option& option) {
  Json::Object schema;
  const std::string type = option.type_name();
  if (type == "list of strings") {
    schema = {{"type", Json::Array{"array", "string"}}, {"items", Json::Object{{"type", "string"}}}};
  } else if (type == "bytes") {
    schema = {{"type", Json::Array{"integer", "string"}}};
  } else {
    schema = {{"type", type}};
  }
  if (!option.choice_names().empty())
    schema.emplace_back("enum", Json::Array(option.choice_names().begin(), option.choice_names().end()));
  std::string help = option.help();
  if (!option.unit_name().empty()) help += " (" + option.unit_name() + ")";
  if (option.choice_names().empty() && !option.range_text().empty()) help += "; " + option.range_text();
  if (!option.is_required()) help += "; default " + option.default_text();
  schema.emplace_back("description", help);
  return schema;
}

Json table_schema(const Options& options, const std::string& description, Json::Object properties = {}) {
  Json::Array required;
  for (const Option& option : options.all()) {
    properties.emplace_back(option.name(), option_schema(option));
    if (option.is_required()) required.push_back(option.name());
  }
  Json::Object schema{
      {"type", "object"}, {"description", description}, {"properties", properties}, {"additionalProperties", false}};
  if (!required.empty()) schema.emplace_back("required", required);
  return schema;
}

template <class Section>
Json section_schema(const std::string& description) {
  Section section;
  Options options;
  declare(options, section);
  return table_schema(options, description);
}

}  // namespace

std::string options_text(const Options& options) {
  if (options.all().empty()) return "no options\n";
  std::string text;
  size_t width = 0;
  for (const Option& option : options.all()) width = std::max(width, option.name().size());
  for (const Option& option : options.all()) {
    std::string notes = option.type_name();
    if (!option.range_text().empty()) notes += ", " + option.range_text();
    if (!option.unit_name().empty()) notes += ", in " + option.unit_name();
    notes += option.is_required() ? ", required" : ", default " + option.default_text();
    text += fmt::format("  {:<{}}  {}\n  {:<{}}  ({})\n", option.name(), width, option.help(), "", width, notes);
  }
  return text;
}

std::string json_schema(const std::vector<std::string>& plugin_folders) {
  Json::Array models;
  Json::Object strategies;
  for (const std::string& name : plugin_names(plugin_folders)) {
    const LoadedPlugin plugin = load_plugin(name, plugin_folders);  // one that cannot be loaded is an Error here
    Options options;
    declare_options(plugin, options);
    const auto provides = plugin->capabilities().provides;
    if (std::find(provides.begin(), provides.end(), "model") != provides.end())
      models.push_back(table_schema(options, plugin.summary(), {{"plugin", Json::Object{{"const", name}}}}));
    else
      strategies.emplace_back(
          name, table_schema(options, plugin.summary(), {{"enabled", Json::Object{{"type", "boolean"}}}}));
  }
  const Json schema = Json::Object{
      {"$schema", "https://json-schema.org/draft/2020-12/schema"},
      {"title", "Strata configuration"},
      {"type", "object"},
      {"properties", Json::Object{{"run", section_schema<RunSection>("the run")},
                                  {"model", Json::Object{{"oneOf", models}}},
                                  {"data", section_schema<DataSection>("the data")},
                                  {"device", section_schema<DeviceSection>("the device")},
                                  {"host", section_schema<HostSection>("the host beside the device")},
                                  {"plugins", Json::Object{{"type", "object"}, {"properties", strategies}}}}},
      {"required", Json::Array{"model", "data"}},
      {"additionalProperties", false}};
  return schema.dump(2) + "\n";
}

}  // namespace strata
