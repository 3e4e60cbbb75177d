// Reading config.json: typed access, and the check that nothing in it is unknown (external_families.h).
#pragma once
#include <string>

#include "plugins/gpt/external_families.h"
#include "strata/json.h"

// Throws strata::Error that names the first field that is unknown or has a value that the model lacks. Nulls and fields
// that every family has (ids of tokens, how weights are stored, what only generation uses) are passed over.
void check_fields(const strata::Json& config, const ExternalFamily& family);

std::string number_text(double value);

// Reads keys of a config.json, or of a table in it; absent ones and nulls take the default.
class Settings {
 public:
  explicit Settings(const strata::Json& json, std::string table = {}) : json_(json), table_(std::move(table)) {}
  int64_t integer(const char* key, int64_t otherwise) const;
  double number(const char* key, double otherwise) const;
  bool boolean(const char* key, bool otherwise) const;
  std::string string(const char* key, const char* otherwise) const;
  bool present(const char* key) const { return find(key) && !find(key)->is_null(); }
  bool is_null(const char* key) const { return find(key) && find(key)->is_null(); }
  // A number of things: from 1 on. `otherwise` 0: it must be there.
  int64_t size(const char* key, int64_t otherwise = 0, int64_t most = int64_t{1} << 31) const;
  double positive(const char* key, double otherwise) const;
  const strata::Json* find(const char* key) const { return json_.find(key); }
  const strata::Json& json() const { return json_; }
  std::string name(const char* key) const;  // for messages

 private:
  const strata::Json& json_;
  std::string table_;
};
