// A TOML file read into tables that remember where each key stands, with overrides from the command line.
// Knows no key: what is allowed is said by the Options of sections and plugins.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "strata/error.h"

namespace strata {

class ConfigTable {
 public:
  using Value = std::variant<bool, int64_t, double, std::string, std::vector<std::string>, std::vector<int64_t>,
                             std::vector<double>>;
  struct Entry {
    std::string key;
    Place place;
    std::variant<Value, std::unique_ptr<ConfigTable>> content;
    std::string type;  // as TOML calls it, for messages: "integer", "array of mixed types", …
  };
  explicit ConfigTable(std::string path) : path_(std::move(path)) {}
  const std::vector<Entry>& entries() const { return entries_; }  // in the file's order
  std::vector<std::string> keys() const;
  bool has(std::string_view key) const { return find(key) != nullptr; }
  const Entry* find(std::string_view key) const;
  const ConfigTable* table(std::string_view key) const;  // null when absent; Error when the key is not a table
  const Value* value(std::string_view key) const;        // null when absent; Error when the key is a table
  const std::string& path() const { return path_; }      // "plugins.adamw"; "" for the root
  Place place;                                           // of the table itself

 private:
  friend class ConfigReader;
  std::string path_;
  std::vector<Entry> entries_;
};

class Config {
 public:
  // `sets`: "plugins.zero.stage=2"; the value is TOML, or a bare word taken as a string. Errors carry file:line:column.
  static Config load(const std::string& path, const std::vector<std::string>& sets);
  static Config parse(const std::string& text, const std::string& filename, const std::vector<std::string>& sets);
  const ConfigTable& root() const { return *root_; }
  const std::string& text() const { return text_; }  // the effective configuration as TOML

 private:
  std::unique_ptr<ConfigTable> root_;
  std::string text_;
};

}  // namespace strata
