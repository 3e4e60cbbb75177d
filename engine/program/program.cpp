// Program and Attributes: lookups and names (program.h).
#include "strata/program.h"

#include <algorithm>

#include "strata/error.h"

namespace strata {
namespace {

const Attribute* find_attribute(const std::vector<std::pair<std::string, Attribute>>& values, std::string_view name) {
  for (const auto& [key, value] : values)
    if (key == name) return &value;
  return nullptr;
}

// "name@3": how unrolling names what exists once a microbatch, one for each op and microbatch. Such names are found by
// search and not kept a second time; but for data, for which the step loop asks.
bool is_of_microbatch(std::string_view name) {
  const size_t at = name.find_last_not_of("0123456789");
  return at != std::string_view::npos && at + 1 < name.size() && name[at] == '@';
}

}  // namespace

const Attributes::List& Attributes::all() const {
  static const List none;
  return values_ ? *values_ : none;
}

bool Attributes::has(std::string_view name) const { return find_attribute(all(), name) != nullptr; }

int64_t Attributes::integer(std::string_view name, std::optional<int64_t> otherwise) const {
  const Attribute* value = find_attribute(all(), name);
  if (!value && otherwise) return *otherwise;
  STRATA_CHECK(value && std::holds_alternative<int64_t>(*value));
  return std::get<int64_t>(*value);
}

double Attributes::real(std::string_view name, std::optional<double> otherwise) const {
  const Attribute* value = find_attribute(all(), name);
  if (!value && otherwise) return *otherwise;
  STRATA_CHECK(value && !std::holds_alternative<std::string>(*value));
  return std::holds_alternative<double>(*value) ? std::get<double>(*value) : double(std::get<int64_t>(*value));
}

std::string Attributes::string(std::string_view name) const {
  const Attribute* value = find_attribute(all(), name);
  STRATA_CHECK(value && std::holds_alternative<std::string>(*value));
  return std::get<std::string>(*value);
}

void Attributes::set(std::string_view name, Attribute value) {
  List list = all();
  const auto known = std::find_if(list.begin(), list.end(), [&](const auto& entry) { return entry.first == name; });
  if (known != list.end())
    known->second = std::move(value);
  else
    list.emplace_back(name, std::move(value));
  values_ = std::make_shared<const List>(std::move(list));
}

TensorId Program::add(Tensor tensor) {
  const int32_t id = int32_t(tensors.size());
  if (!countable(tensor.shape))
    throw Error("tensor " + tensor.name + " " + text(tensor.shape) + " has more than the " +
                std::to_string(kMostElements) + " elements that a tensor may have; lower the sizes it is made of.");
  if (tensor.name.empty()) tensor.name = "t" + std::to_string(id);
  const bool copies = !tensor.persistent && tensor.role != Role::data && is_of_microbatch(tensor.name);
  if (copies || !names_.emplace(tensor.name, id).second) {
    tensor.name += "#" + std::to_string(id);
    names_.emplace(tensor.name, id);
  }
  tensors.push_back(std::move(tensor));
  return {id};
}

TensorId Program::add_part(TensorId whole, std::string name, Shape shape, int64_t offset) {
  Tensor part = tensors.at(size_t(whole.value));
  part.name = std::move(name);
  part.shape = std::move(shape);
  part.part_of = whole;
  if (part.dimensions.size() != part.shape.size()) part.dimensions.clear();
  part.part_offset = offset;
  return add(std::move(part));
}

TensorId Program::find(std::string_view name) const {
  if (const auto found = names_.find(std::string(name)); found != names_.end()) return {found->second};
  if (!is_of_microbatch(name)) return {};
  for (size_t t = 0; t < tensors.size(); ++t)
    if (tensors[t].name == name) return {int32_t(t)};
  return {};
}

void Program::rename(TensorId id, const std::string& name) {
  STRATA_CHECK(!names_.contains(name));
  names_.erase((*this)[id].name);
  (*this)[id].name = name;
  names_.emplace(name, id.value);
}

void Program::drop(TensorId id) {
  Tensor& tensor = (*this)[id];
  names_.erase(tensor.name);
  tensor.name = "unused " + tensor.name;
  tensor.persistent = false;
  tensor.role = Role::activation;
}

std::vector<TensorId> Program::with_role(Role role) const {
  std::vector<TensorId> result;
  for (int32_t i = 0; i < int32_t(tensors.size()); ++i)
    if (tensors[i].persistent && tensors[i].role == role && !tensors[i].part_of) result.push_back({i});
  return result;
}

}  // namespace strata
