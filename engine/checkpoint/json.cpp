// The one file that knows nlohmann-json; see strata/json.h.
#include "strata/json.h"

#include <nlohmann/json.hpp>

#include <set>
#include <type_traits>

#include "strata/error.h"

namespace strata {
namespace {

constexpr int kDeepest = 64;

// Builds the tree from parser events; refuses what a tree cannot say.
class Reader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Reader(std::string file) : file_(std::move(file)) {}
  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(int64_t(value)); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > uint64_t(INT64_MAX)) return put(double(value));
    return put(int64_t(value));
  }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(false); }
  bool start_array(std::size_t) override { return open(true); }
  bool key(string_t& name) override {
    if (!levels_.back().names.insert(name).second) throw Error(file_ + ": names the key \"" + name + "\" twice.");
    levels_.back().object.emplace_back(name, Json());
    return true;
  }
  bool end_object() override { return close(Json(std::move(levels_.back().object))); }
  bool end_array() override { return close(Json(std::move(levels_.back().array))); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    throw Error(file_ + ": is not JSON from byte " + std::to_string(position) + " on.");
  }
  Json root;

 private:
  struct Level {
    bool is_array;
    Json::Array array;
    Json::Object object;
    std::set<std::string> names;
  };
  bool open(bool is_array) {
    if (levels_.size() >= kDeepest) throw Error(file_ + ": nests deeper than " + std::to_string(kDeepest) + " levels.");
    levels_.push_back({is_array, {}, {}, {}});
    return true;
  }
  bool close(Json value) {
    levels_.pop_back();
    return put(std::move(value));
  }
  bool put(Json value) {
    if (levels_.empty())
      root = std::move(value);
    else if (levels_.back().is_array)
      levels_.back().array.push_back(std::move(value));
    else
      levels_.back().object.back().second = std::move(value);
    return true;
  }
  std::string file_;
  std::vector<Level> levels_;
};

}  // namespace

// Not the variant's own: libstdc++ takes it for one that always has a value, and where a copy finds no memory it
// destroys what is not there.
Json::Json(const Json& other) {
  std::visit([this](const auto& value) { value_ = std::decay_t<decltype(value)>(value); }, other.value_);
}

Json::Json(Json&& other) noexcept : value_(std::move(other.value_)) {}

Json& Json::operator=(Json other) noexcept {
  value_ = std::move(other.value_);
  return *this;
}

Json Json::parse(std::string_view text, const std::string& file) {
  Reader reader(file);
  nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
  return std::move(reader.root);
}

const Json* Json::find(std::string_view key) const {
  if (const auto* object = std::get_if<Object>(&value_))
    for (const auto& [name, value] : *object)
      if (name == key) return &value;
  return nullptr;
}

#define STRATA_JSON_GET(Type, name)                                  \
  if (const auto* value = std::get_if<Type>(&value_)) return *value; \
  throw Error(what + " must be " name ".")

bool Json::boolean(const std::string& what) const { STRATA_JSON_GET(bool, "true or false"); }
int64_t Json::integer(const std::string& what) const { STRATA_JSON_GET(int64_t, "an integer"); }
const std::string& Json::string(const std::string& what) const { STRATA_JSON_GET(std::string, "a string"); }
const Json::Array& Json::array(const std::string& what) const { STRATA_JSON_GET(Array, "an array"); }
const Json::Object& Json::object(const std::string& what) const { STRATA_JSON_GET(Object, "an object"); }
#undef STRATA_JSON_GET

double Json::number(const std::string& what) const {
  if (const auto* integer = std::get_if<int64_t>(&value_)) return double(*integer);
  if (const auto* real = std::get_if<double>(&value_)) return *real;
  throw Error(what + " must be a number.");
}

std::string Json::dump(int indent) const {
  std::string out;
  write(out, indent, 0);
  return out;
}

void Json::write(std::string& out, int indent, int depth) const {
  const auto line = [&](int level) {
    if (indent > 0) out += "\n" + std::string(size_t(indent * level), ' ');
  };
  if (const auto* array = std::get_if<Array>(&value_)) {
    out += "[";
    for (size_t i = 0; i < array->size(); ++i) {
      if (i) out += indent > 0 ? ", " : ",";
      (*array)[i].write(out, indent, depth + 1);
    }
    out += "]";
  } else if (const auto* object = std::get_if<Object>(&value_)) {
    out += "{";
    for (size_t i = 0; i < object->size(); ++i) {
      if (i) out += ",";
      line(depth + 1);
      out += nlohmann::json((*object)[i].first).dump() + (indent > 0 ? ": " : ":");
      (*object)[i].second.write(out, indent, depth + 1);
    }
    if (!object->empty()) line(depth);
    out += "}";
  } else if (const auto* boolean = std::get_if<bool>(&value_)) {
    out += *boolean ? "true" : "false";
  } else if (const auto* integer = std::get_if<int64_t>(&value_)) {
    out += std::to_string(*integer);
  } else if (const auto* real = std::get_if<double>(&value_)) {
    out += nlohmann::json(*real).dump();
  } else if (const auto* string = std::get_if<std::string>(&value_)) {
    out += nlohmann::json(*string).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  } else {
    out += "null";
  }
}

}  // namespace strata
