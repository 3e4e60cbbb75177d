// Fields of config.json; see external_fields.h.
#include "plugins/gpt/external_fields.h"

#include <algorithm>
#include <cstdio>

#include "strata/error.h"

namespace {

using external_tables::kAnywhere;
using strata::Error;
using strata::Json;

// 0 and 0.0 are one value.
bool is(const Json& value, std::string_view wanted) {
  const Json other = Json::parse(wanted, "");
  return value.is_number() && other.is_number() ? value.number("") == other.number("") : value.dump() == wanted;
}

const ExternalField* find_field(const ExternalFamily& family, std::string_view name) {
  for (const auto fields : family.fields)
    for (const ExternalField& field : fields)
      if (field.name == name) return &field;
  return nullptr;
}

}  // namespace

void check_fields(const Json& config, const ExternalFamily& family) {
  for (const auto& [key, value] : config.object("config.json")) {
    if (value.is_null() || std::find(std::begin(kAnywhere), std::end(kAnywhere), key) != std::end(kAnywhere)) continue;
    const ExternalField* field = find_field(family, key);
    std::string text = value.dump();
    if (text.size() > 60) text = text.substr(0, 57) + "...";
    if (!field)
      throw Error("config.json sets \"" + key + "\" to " + text + ", a field that the gpt plugin does not know in \"" +
                  std::string(family.type) +
                  "\" models; take it out if what the model computes does not change by it.");
    if (field->use == ExternalField::Use::fixed && !is(value, field->value))
      throw Error("config.json sets \"" + key + "\" to " + text + ", which the gpt plugin does not have in \"" +
                  std::string(family.type) + "\" models; expected " + std::string(field->value) + ".");
  }
}

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.12g", value);
  if (std::strtod(text, nullptr) != value) std::snprintf(text, sizeof text, "%.17g", value);
  std::string result = text;
  if (result.find_first_of(".en") == std::string::npos) result += ".0";
  return result;
}

std::string Settings::name(const char* key) const {
  return "config.json: \"" + (table_.empty() ? "" : table_ + ".") + std::string(key) + "\"";
}
int64_t Settings::integer(const char* key, int64_t otherwise) const {
  return present(key) ? find(key)->integer(name(key)) : otherwise;
}
double Settings::number(const char* key, double otherwise) const {
  return present(key) ? find(key)->number(name(key)) : otherwise;
}
bool Settings::boolean(const char* key, bool otherwise) const {
  return present(key) ? find(key)->boolean(name(key)) : otherwise;
}
std::string Settings::string(const char* key, const char* otherwise) const {
  return present(key) ? find(key)->string(name(key)) : otherwise;
}
int64_t Settings::size(const char* key, int64_t otherwise, int64_t most) const {
  if (otherwise == 0 && !present(key))
    throw Error("config.json lacks \"" + (table_.empty() ? "" : table_ + ".") + std::string(key) + "\".");
  const int64_t value = integer(key, otherwise);
  if (value < 1 || value > most)
    throw Error(name(key) + " is " + std::to_string(value) + "; expected 1 to " + std::to_string(most) + ".");
  return value;
}
double Settings::positive(const char* key, double otherwise) const {
  const double value = number(key, otherwise);
  if (!(value > 0)) throw Error(name(key) + " is " + number_text(value) + "; expected more than 0.");
  return value;
}
