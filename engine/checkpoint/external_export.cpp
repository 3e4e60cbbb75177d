// Writing mapped tensors; see external_export.h.
#include "engine/checkpoint/external_export.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "engine/checkpoint/external_import.h"
#include "engine/checkpoint/safetensors_writer.h"
#include "strata/convert.h"
#include "strata/json.h"

namespace strata {
namespace {

// The parameters that the tensor being written is made of.
class Parameters {
 public:
  Parameters(const std::map<std::string, Shape>& shapes, const std::function<void(const std::string&, float*)>& read)
      : shapes_(shapes), read_(read) {}
  // Keeps those of them that are here already, lets go of all others.
  void bring(const ExternalTensor& tensor) {
    const auto wanted = [&](const std::string& name) {
      return std::any_of(tensor.rows.begin(), tensor.rows.end(),
                         [&](const auto& rows) { return rows.parameter == name; });
    };
    std::erase_if(values_, [&](const auto& entry) { return !wanted(entry.first); });
    for (const auto& rows : tensor.rows) {
      auto& values = values_[rows.parameter];
      if (values) continue;
      values = std::make_unique_for_overwrite<float[]>(size_t(elements(shapes_.at(rows.parameter))));
      read_(rows.parameter, values.get());
    }
  }
  const float* at(const std::string& name) const { return values_.at(name).get(); }

 private:
  const std::map<std::string, Shape>& shapes_;
  const std::function<void(const std::string&, float*)>& read_;
  std::map<std::string, std::unique_ptr<float[]>> values_;
};

// Takes f32s in the file's order and appends them to it as what they become there.
class Converter {
 public:
  Converter(SafetensorsWriter& writer, DType dtype, std::string name)
      : writer_(writer), dtype_(dtype), name_(std::move(name)), bytes_(size_t(kElementsAtOnce * size_of(dtype))) {}
  void append(const float* values, int64_t count) {
    for (int64_t i = 0; i < count; i += kElementsAtOnce) {
      const int64_t some = std::min(kElementsAtOnce, count - i);
      from_f32(dtype_, values + i, bytes_.data(), some);
      if (dtype_ != DType::f32) check(values + i, some);
      writer_.append(std::span(bytes_).first(size_t(some * size_of(dtype_))));
    }
  }

 private:
  void check(const float* values, int64_t count) const {
    const float first_infinite = dtype_ == DType::f16 ? 65520.0f : 0x1.FFp127f;  // halfway to the number that is none
    for (int64_t i = 0; i < count; ++i)
      if (const float size = std::abs(values[i]); size >= first_infinite && std::isfinite(size)) {
        char number[32];
        std::snprintf(number, sizeof number, "%g", double(values[i]));
        throw Error("the tensor \"" + name_ + "\" holds " + number + ", which is infinite in " +
                        std::string(name_of(dtype_)) + "; export with another --dtype.",
                    ExitCode::failed);
      }
  }
  SafetensorsWriter& writer_;
  DType dtype_;
  std::string name_;
  std::vector<std::byte> bytes_;
};

void append_rows(const ExternalTensor& tensor, const Parameters& parameters, Converter& out) {
  const int64_t columns = external_columns(tensor);
  std::vector<ExternalTensor::Rows> rows = tensor.rows;
  std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.from < b.from; });
  for (const auto& some : rows) out.append(parameters.at(some.parameter) + some.to * columns, some.count * columns);
}

// (out, in) here, (in, out) there: some columns at a time.
void append_transposed(const ExternalTensor& tensor, const Parameters& parameters, Converter& out) {
  const int64_t columns = tensor.shape[0], width = tensor.shape[1];
  const int64_t together =
      std::clamp<int64_t>(kElementsAtOnce / std::max<int64_t>(width, 1), 1, std::max<int64_t>(columns, 1));
  std::vector<float> piece(size_t(together * width));
  for (int64_t column = 0; column < columns; column += together) {
    const int64_t some = std::min(together, columns - column);
    for (const auto& rows : tensor.rows) {
      const float* from = parameters.at(rows.parameter) + column;
      for (int64_t r = 0; r < rows.count; ++r)
        for (int64_t c = 0; c < some; ++c) piece[size_t(c * width + rows.from + r)] = from[(rows.to + r) * columns + c];
    }
    out.append(piece.data(), some * width);
  }
}

// What a plugin's mapping must do: each row of the tensor comes from one place, which exists.
void check_rows(const ExternalTensor& tensor, const std::map<std::string, Shape>& parameters) {
  std::vector<std::pair<int64_t, int64_t>> pieces;
  for (const auto& rows : tensor.rows) {
    const auto parameter = parameters.find(rows.parameter);
    if (parameter == parameters.end() || rows.to < 0 || rows.to + rows.count > parameter->second[0] ||
        elements(parameter->second) != parameter->second[0] * external_columns(tensor))
      throw Error("the model maps \"" + tensor.name + "\" to rows that \"" + rows.parameter + "\" does not have.");
    pieces.emplace_back(rows.from, rows.count);
  }
  std::sort(pieces.begin(), pieces.end());
  int64_t next = 0;
  for (const auto& [from, count] : pieces) {
    if (from != next) break;
    next += count;
  }
  if (next != external_rows(tensor)) throw Error("the model does not map all rows of \"" + tensor.name + "\".");
}

// Consecutive tensors of at most `most` bytes, or a larger one alone.
std::vector<std::vector<ExternalTensor>> in_shards(const std::vector<ExternalTensor>& tensors, int64_t size,
                                                   int64_t most) {
  std::vector<std::vector<ExternalTensor>> shards(1);
  int64_t bytes = 0;
  for (const ExternalTensor& tensor : tensors) {
    const int64_t more = elements(tensor.shape) * size;
    if (!shards.back().empty() && bytes + more > most) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().push_back(tensor);
    bytes += more;
  }
  return shards;
}

std::string file_name(size_t shard, size_t count, const std::string& whole) {
  if (count == 1) return whole;
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", shard + 1, count);
  return name;
}

}  // namespace

void export_tensors(const std::string& folder, const std::vector<ExternalTensor>& mapping,
                    const std::map<std::string, Shape>& parameters,
                    const std::function<void(const std::string& parameter, float* out)>& read,
                    const ExportOptions& options) {
  std::vector<ExternalTensor> tensors;
  for (const ExternalTensor& tensor : mapping)
    if (!tensor.rows.empty() &&
        std::none_of(tensors.begin(), tensors.end(), [&](const auto& before) { return same_rows(before, tensor); }))
      tensors.push_back(tensor);
  for (const ExternalTensor& tensor : tensors) check_rows(tensor, parameters);
  const auto shards = in_shards(tensors, size_of(options.dtype), options.shard_bytes);
  Parameters values(parameters, read);
  Json::Object places;
  int64_t bytes = 0, count = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    SafetensorsHeader header{{}, {{"format", "pt"}}};
    const std::string name = file_name(i, shards.size(), options.whole);
    for (const ExternalTensor& tensor : shards[i]) {
      header.tensors.push_back({tensor.name, options.dtype, tensor.shape});
      places.emplace_back(tensor.name, name);
      count += elements(tensor.shape);
      bytes += elements(tensor.shape) * size_of(options.dtype);
    }
    SafetensorsWriter writer((std::filesystem::path(folder) / name).string(), header);
    for (const ExternalTensor& tensor : shards[i]) {
      values.bring(tensor);
      Converter converter(writer, options.dtype, tensor.name);
      if (tensor.transposed && tensor.shape.size() > 1)
        append_transposed(tensor, values, converter);
      else
        append_rows(tensor, values, converter);
    }
    writer.commit();
  }
  if (shards.size() == 1) return;
  const Json index = Json::Object{{"metadata", Json::Object{{"total_parameters", count}, {"total_size", bytes}}},
                                  {"weight_map", std::move(places)}};
  write_atomically((std::filesystem::path(folder) / "model.safetensors.index.json").string(), index.dump(2) + "\n");
}

}  // namespace strata
