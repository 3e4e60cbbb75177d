// Reading mapped tensors; see external_import.h.
#include "engine/checkpoint/external_import.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "engine/checkpoint/interruption.h"
#include "strata/convert.h"

namespace strata {
namespace {

bool is_floating(const StoredTensor& tensor) {
  const std::string& name = tensor.dtype_name;
  return name[0] != 'I' && name[0] != 'U' && name != "BOOL";
}

// Elements [first, first + count) of a stored tensor, as f32.
void read_elements(const ExternalFolder::Found& found, int64_t first, int64_t count, float* out) {
  const DType dtype = *found.tensor.dtype;
  const int64_t size = size_of(dtype);
  if (dtype == DType::f32) {
    for (int64_t i = 0; i < count; i += kElementsAtOnce) {
      stop_if_interrupted();
      const int64_t some = std::min(kElementsAtOnce, count - i);
      found.file->read(found.tensor, size_t((first + i) * size),
                       std::as_writable_bytes(std::span(out + i, size_t(some))));
    }
    return;
  }
  std::vector<uint16_t> piece(size_t(std::min(count, kElementsAtOnce)));
  for (int64_t i = 0; i < count; i += kElementsAtOnce) {
    stop_if_interrupted();
    const std::span some = std::span(piece).first(size_t(std::min(kElementsAtOnce, count - i)));
    found.file->read(found.tensor, size_t((first + i) * size), std::as_writable_bytes(some));
    to_f32(dtype, some.data(), out + i, int64_t(some.size()));
  }
}

// Stored (in, out), wanted (out, in): some whole stored rows at a time, each a column of the parameter.
void read_transposed(const ExternalFolder::Found& found, const ExternalTensor& tensor, const std::string& parameter,
                     float* out) {
  const int64_t columns = tensor.shape[0], width = tensor.shape[1];
  const int64_t together =
      std::clamp<int64_t>(kElementsAtOnce / std::max<int64_t>(width, 1), 1, std::max<int64_t>(columns, 1));
  std::vector<float> piece(size_t(together * width));
  for (int64_t column = 0; column < columns; column += together) {
    const int64_t some = std::min(together, columns - column);
    read_elements(found, column * width, some * width, piece.data());
    for (const auto& rows : tensor.rows) {
      if (rows.parameter != parameter) continue;
      for (int64_t r = 0; r < rows.count; ++r)
        for (int64_t c = 0; c < some; ++c)
          out[(rows.to + r) * columns + column + c] = piece[size_t(c * width + rows.from + r)];
    }
  }
}

}  // namespace

int64_t external_columns(const ExternalTensor& tensor) {
  return tensor.shape.size() == 1 ? 1 : tensor.transposed ? tensor.shape[0] : tensor.shape[1];
}

int64_t external_rows(const ExternalTensor& tensor) {
  return tensor.shape.size() == 1 || !tensor.transposed ? tensor.shape[0] : tensor.shape[1];
}

bool same_rows(const ExternalTensor& a, const ExternalTensor& b) {
  return a.shape == b.shape && a.transposed == b.transposed &&
         std::equal(a.rows.begin(), a.rows.end(), b.rows.begin(), b.rows.end(), [](const auto& x, const auto& y) {
           return x.from == y.from && x.parameter == y.parameter && x.to == y.to && x.count == y.count;
         });
}

ExternalImport::ExternalImport(const ExternalFolder& folder, std::vector<ExternalTensor> mapping,
                               std::map<std::string, Shape> parameters)
    : folder_(folder.path()), parameters_(std::move(parameters)) {
  const auto& tensors = folder.tensors();
  std::set<std::string> unknown;
  for (const auto& [name, found] : tensors)
    if (is_floating(found.tensor)) unknown.insert(name);
  // Files of a bare base model lack the first component of the names ("transformer.", "model.").
  const std::string first = mapping.empty() ? "" : mapping.front().name;
  const std::string prefix = first.substr(0, first.find('.') + 1);
  const auto find = [&](const std::string& name) {
    const auto found = tensors.find(name);
    if (found != tensors.end() || prefix.empty() || name.rfind(prefix, 0) != 0) return found;
    return tensors.find(name.substr(prefix.size()));
  };
  std::vector<ExternalTensor> missing;
  for (const ExternalTensor& tensor : mapping) {
    const auto found = find(tensor.name);
    if (found == tensors.end()) {
      if (!tensor.rows.empty()) missing.push_back(tensor);
      continue;
    }
    unknown.erase(found->first);
    if (tensor.rows.empty()) continue;
    const StoredTensor& stored = found->second.tensor;
    Source source{tensor, &found->second, found->second.file->path() + ": tensor \"" + found->first + "\""};
    if (stored.shape != tensor.shape)
      throw Error(source.where + " is " + text(stored.shape) + ", but " + folder.config_name() + " makes it " +
                  text(tensor.shape) + ".");
    if (!stored.dtype || (*stored.dtype != DType::f32 && !is_half(*stored.dtype)))
      throw Error(source.where + " has dtype " + stored.dtype_name + "; expected F32, BF16 or F16.");
    const auto before = std::find_if(sources_.begin(), sources_.end(),
                                     [&](const Source& other) { return same_rows(other.tensor, tensor); });
    if (before == sources_.end())
      sources_.push_back(std::move(source));
    else
      second_names_.push_back({size_t(before - sources_.begin()), std::move(source)});
  }
  for (const ExternalTensor& tensor : missing)
    if (std::none_of(sources_.begin(), sources_.end(),
                     [&](const Source& source) { return same_rows(source.tensor, tensor); }))
      throw Error(folder_ + ": lacks the tensor \"" + tensor.name + "\".");
  if (!unknown.empty())
    throw Error(folder_ + ": holds the tensor \"" + *unknown.begin() + "\"" +
                (unknown.size() > 1 ? " (and " + std::to_string(unknown.size() - 1) + " more)" : "") +
                " that this architecture does not have.");
  check_filled();
}

// What a plugin's mapping must do; each row of each parameter comes from one place.
void ExternalImport::check_filled() {
  std::map<std::string, std::vector<std::pair<int64_t, int64_t>>> filled;
  for (const Source& source : sources_)
    for (const auto& rows : source.tensor.rows) {
      const auto parameter = parameters_.find(rows.parameter);
      if (parameter == parameters_.end())
        throw Error(source.where + " fills \"" + rows.parameter + "\", which is no parameter of the model.");
      const int64_t width = elements(parameter->second) / std::max<int64_t>(parameter->second[0], 1);
      if (external_columns(source.tensor) != width || rows.from < 0 || rows.count < 0 ||
          rows.from + rows.count > external_rows(source.tensor))
        throw Error(source.where + " does not fit the rows of \"" + rows.parameter + "\".");
      filled[rows.parameter].emplace_back(rows.to, rows.count);
    }
  for (size_t i = 0; i < sources_.size(); ++i)
    for (const auto& rows : sources_[i].tensor.rows) sources_of_[rows.parameter].insert(i);
  for (const auto& [name, shape] : parameters_) {
    auto& pieces = filled[name];
    std::sort(pieces.begin(), pieces.end());
    int64_t next = 0;
    for (const auto& [to, count] : pieces) {
      if (to != next) break;
      next += count;
    }
    if (next != shape[0]) throw Error(folder_ + ": does not fill the parameter \"" + name + "\" exactly.");
  }
}

std::string ExternalImport::differing_second_name() const {
  for (const SecondName& second : second_names_)
    if (!equal(sources_[second.source], second.other)) return second.other.tensor.name;
  return "";
}

bool ExternalImport::equal(const Source& a, const Source& b) const {
  const int64_t count = elements(a.tensor.shape);
  std::vector<float> left(size_t(std::min(count, kElementsAtOnce))), right(left.size());
  for (int64_t i = 0; i < count; i += kElementsAtOnce) {
    const int64_t some = std::min(kElementsAtOnce, count - i);
    read_elements(*a.found, i, some, left.data());
    read_elements(*b.found, i, some, right.data());
    if (std::memcmp(left.data(), right.data(), size_t(some) * sizeof(float)) != 0) return false;
  }
  return true;
}

void ExternalImport::read(const std::string& parameter, float* out) const {
  for (const size_t index : sources_of_.at(parameter)) {
    const Source& source = sources_[index];
    const ExternalTensor& tensor = source.tensor;
    if (tensor.transposed && tensor.shape.size() > 1) {
      read_transposed(*source.found, tensor, parameter, out);
      continue;
    }
    const int64_t columns = external_columns(tensor);
    for (const auto& rows : tensor.rows)
      if (rows.parameter == parameter)
        read_elements(*source.found, rows.from * columns, rows.count * columns, out + rows.to * columns);
  }
}

}  // namespace strata
