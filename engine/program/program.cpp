// Program and Attributes: lookups and names (program.h).
#include "strata/program.h"

#include <algorithm>

#include "strata/error.h"

namespace strata {
namespace {

const Attribute* find_attribute(const std::vector<std::pair<std::string, Attribute>>& values, std::string_view name) {
  for (const auto& [key, value] : values)
    if (std::string_view(key) == name) return &value;  // no Name, which a string may become, is made
  return nullptr;
}

}  // namespace

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
  values_ = std::move(list);
}

// Every member but ops and forms.
static_assert(sizeof(Program) == 232);  // a new one has to be copied, too
Program Program::with_tensors_of(const Program& other) {
  Program copy;
  copy.tensors = other.tensors;
  copy.storage_directories = other.storage_directories;
  copy.direct_storage = other.direct_storage;
  copy.one_memory = other.one_memory;
  copy.storage_limit = other.storage_limit;
  copy.losses = other.losses;
  copy.again_if = other.again_if;
  copy.names_ = other.names_;
  return copy;
}

TensorId Program::add(Tensor tensor) {
  const int32_t id = int32_t(tensors.size());
  if (!countable(tensor.shape))
    throw Error("tensor " + tensor.name + " " + text(tensor.shape) + " has more than the " +
                std::to_string(kMostElements) + " elements that a tensor may have; lower the sizes it is made of.");
  if (tensor.name.empty()) tensor.name = "t" + std::to_string(id);
  // Copies are many and nobody asks for them by name; what exists once a microbatch, but data, unrolling has not
  // registered either (find searches).
  const bool of_microbatch = !tensor.persistent && tensor.role != Role::data && tensor.name.is_of_microbatch();
  if (tensor.copy_of) {
    tensor.name = tensor.name.of_copy(id);
  } else if (of_microbatch || !names_.emplace(tensor.name, id).second) {
    tensor.name = tensor.name.of_copy(id);
    names_.emplace(tensor.name, id);
  }
  tensors.push_back(std::move(tensor));
  return {id};
}

TensorId Program::add_part(TensorId whole, Name name, Shape shape, int64_t offset) {
  Tensor part = tensors.at(size_t(whole.value));
  part.name = std::move(name);
  part.shape = std::move(shape);
  part.part_of = whole;
  if (part.dimensions.size() != part.shape.size()) part.dimensions = {};
  part.part_offset = offset;
  return add(std::move(part));
}

TensorId Program::find(const Name& name) const {
  const std::string text = name;
  if (const auto found = names_.find(text); found != names_.end()) return {found->second};
  if (text.find_first_of("@#") == std::string::npos) return {};
  for (size_t t = 0; t < tensors.size(); ++t)
    if (tensors[t].name == text) return {int32_t(t)};
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
