// Access to a tokenizer.json; see field.h.
#include "engine/data/tokenizer_json/field.h"

#include <algorithm>

#include "strata/error.h"

namespace strata {

void Field::refuse(const std::string& why) const { throw Error(where() + ": " + why); }

void Field::only(std::initializer_list<std::string_view> names) const {
  for (const auto& [name, value] : value_->object(where()))
    if (std::find(names.begin(), names.end(), name) == names.end())
      Field(value, file_, below(name)).refuse("this field is not known, and could change the tokens.");
}

std::optional<Field> Field::find(const std::string& name) const {
  value_->object(where());  // refuses what is none
  const Json* found = value_->find(name);
  if (!found || found->is_null()) return {};
  return Field(*found, file_, below(name));
}

Field Field::at(const std::string& name) const {
  if (const auto found = find(name)) return *found;
  refuse("lacks \"" + name + "\".");
}

std::vector<Field> Field::items() const {
  std::vector<Field> all;
  for (const Json& item : value_->array(where()))
    all.push_back(Field(item, file_, path_ + "[" + std::to_string(all.size()) + "]"));
  return all;
}

std::vector<std::pair<std::string, Field>> Field::members() const {
  std::vector<std::pair<std::string, Field>> all;
  for (const auto& [name, value] : value_->object(where())) all.emplace_back(name, Field(value, file_, below(name)));
  return all;
}

bool Field::flag(const std::string& name, bool otherwise) const {
  const auto found = find(name);
  return found ? found->flag() : otherwise;
}

}  // namespace strata
