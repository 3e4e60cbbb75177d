// A value in a tokenizer.json with its place, so that what is refused is told with file and field.
#pragma once
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "strata/json.h"

namespace strata {

class Field {
 public:
  // The whole of a file; `value` must outlive this.
  Field(const Json& value, std::string file) : value_(&value), file_(std::move(file)) {}

  // Error beginning with file and field; what is not supported is never ignored.
  [[noreturn]] void refuse(const std::string& why) const;
  // Refuses fields of this object other than those named.
  void only(std::initializer_list<std::string_view> names) const;

  std::optional<Field> find(const std::string& name) const;  // none when absent or null
  Field at(const std::string& name) const;                   // refused when absent or null
  std::vector<Field> items() const;                          // of an array
  std::vector<std::pair<std::string, Field>> members() const;
  const std::string& text() const { return value_->string(where()); }
  bool flag() const { return value_->boolean(where()); }
  int64_t integer() const { return value_->integer(where()); }
  // A flag that may be absent.
  bool flag(const std::string& name, bool otherwise) const;
  bool is_text() const { return value_->is_string(); }
  std::string type() const { return at("type").text(); }

 private:
  Field(const Json& value, std::string file, std::string path)
      : value_(&value), file_(std::move(file)), path_(std::move(path)) {}
  std::string where() const { return path_.empty() ? file_ : file_ + ": " + path_; }
  std::string below(const std::string& name) const { return path_.empty() ? name : path_ + "." + name; }

  const Json* value_;
  std::string file_, path_;
};

}  // namespace strata
