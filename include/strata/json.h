// JSON as a plain tree: what checkpoints, foreign model folders and the plugins that read their configuration need.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace strata {

class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;  // in the text's order
  Json() = default;
  Json(const Json& other);
  Json(Json&& other) noexcept;
  Json& operator=(Json other) noexcept;
  Json(std::nullptr_t) {}
  Json(bool value) : value_(value) {}
  Json(int value) : value_(int64_t{value}) {}
  Json(int64_t value) : value_(value) {}
  Json(double value) : value_(value) {}
  Json(std::string value) : value_(std::move(value)) {}
  Json(const char* value) : value_(std::string(value)) {}
  Json(Array value) : value_(std::move(value)) {}
  Json(Object value) : value_(std::move(value)) {}

  // Throws Error beginning with `file` when the text is not JSON, nests too deeply, or names a key twice.
  static Json parse(std::string_view text, const std::string& file);
  std::string dump(int indent = 0) const;  // one line, or indented

  bool is_null() const { return std::holds_alternative<std::nullptr_t>(value_); }
  const Json* find(std::string_view key) const;  // null when absent or when this is no object
  // Typed access; `what` names the value in the Error that a wrong type gives.
  bool boolean(const std::string& what) const;
  int64_t integer(const std::string& what) const;
  double number(const std::string& what) const;
  const std::string& string(const std::string& what) const;
  const Array& array(const std::string& what) const;
  const Object& object(const std::string& what) const;
  bool is_number() const { return std::holds_alternative<int64_t>(value_) || std::holds_alternative<double>(value_); }
  bool is_string() const { return std::holds_alternative<std::string>(value_); }

 private:
  void write(std::string& out, int indent, int depth) const;
  std::variant<std::nullptr_t, bool, int64_t, double, std::string, Array, Object> value_ = nullptr;
};

}  // namespace strata
