// Reading and writing Hugging Face folders; see external.h.
#include "engine/checkpoint/external.h"

#include <cstring>
#include <filesystem>
#include <set>

#include "engine/checkpoint/safetensors.h"
#include "strata/convert.h"
#include "strata/json.h"

namespace strata {
namespace {

namespace fs = std::filesystem;

std::vector<float> to_float(const StoredTensor& tensor, std::span<const std::byte> bytes, const std::string& where) {
  if (tensor.dtype != DType::f32 && !is_half(tensor.dtype))
    throw Error(where + " has dtype " + std::string(name_of(tensor.dtype)) + "; expected f32, bf16 or f16.");
  const std::vector<std::byte> aligned(bytes.begin(), bytes.end());  // in a foreign file it may lie anywhere
  std::vector<float> values(size_t(elements(tensor.shape)));
  to_f32(tensor.dtype, aligned.data(), values.data(), int64_t(values.size()));
  return values;
}

std::string read_text(const fs::path& path) {
  const MappedFile file(path.string());
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

std::vector<SafetensorsFile> open_files(const std::string& folder) {
  std::set<std::string> names;
  const fs::path index = fs::path(folder) / "model.safetensors.index.json";
  if (fs::exists(index)) {
    const Json json = Json::parse(read_text(index), index.string());
    const Json* map = json.find("weight_map");
    if (!map) throw Error(index.string() + ": lacks \"weight_map\".");
    for (const auto& [tensor, file] : map->object(index.string() + ": weight_map")) {
      const std::string& name = file.string(index.string() + ": a file name");
      if (name.find('/') != std::string::npos)
        throw Error(index.string() + ": names the file \"" + name + "\" outside of the folder.");
      names.insert(name);
    }
  } else {
    names.insert("model.safetensors");
  }
  std::vector<SafetensorsFile> files;
  for (const std::string& name : names) files.emplace_back((fs::path(folder) / name).string());
  return files;
}

// Files of a bare base model lack the first component of the names ("transformer.", "model.").
std::string bare(const std::string& name) { return name.substr(name.find('.') + 1); }

int64_t row_elements(const ExternalTensor& tensor) {
  return tensor.shape.size() == 1 ? 1 : tensor.transposed ? tensor.shape[0] : tensor.shape[1];
}

// Element (row, column) of the tensor after transposing, in the file's order.
int64_t at(const ExternalTensor& tensor, int64_t row, int64_t column) {
  if (tensor.shape.size() == 1) return row;
  return tensor.transposed ? column * tensor.shape[1] + row : row * tensor.shape[1] + column;
}

}  // namespace

std::string read_external_config(const std::string& folder) {
  const fs::path path = fs::path(folder) / "config.json";
  if (!fs::exists(path)) throw Error(folder + ": holds no config.json; expected a Hugging Face model folder.");
  return read_text(path);
}

std::map<std::string, std::vector<float>> import_tensors(const std::string& folder,
                                                         const std::vector<ExternalTensor>& mapping,
                                                         const std::map<std::string, Shape>& parameters) {
  const std::vector<SafetensorsFile> files = open_files(folder);
  std::map<std::string, std::pair<const SafetensorsFile*, StoredTensor>> found;
  for (const SafetensorsFile& file : files)
    for (const auto& [name, tensor] : file.tensors()) found[name] = {&file, tensor};
  std::map<std::string, std::vector<float>> values;
  std::map<std::string, int64_t> filled;
  for (const auto& [name, shape] : parameters) values[name].resize(size_t(elements(shape)));
  for (const ExternalTensor& tensor : mapping) {
    auto source = found.find(tensor.name);
    if (source == found.end()) source = found.find(bare(tensor.name));
    if (source == found.end()) {
      if (tensor.rows.empty()) continue;
      throw Error(folder + ": lacks the tensor \"" + tensor.name + "\".");
    }
    const auto [file, stored] = source->second;
    const std::string where = file->path() + ": tensor \"" + source->first + "\"";
    found.erase(source);
    if (tensor.rows.empty()) continue;
    if (stored.shape != tensor.shape)
      throw Error(where + " is " + text(stored.shape) + ", but config.json makes it " + text(tensor.shape) + ".");
    const std::vector<float> from = to_float(stored, file->data(stored), where);
    const int64_t columns = row_elements(tensor);
    for (const auto& rows : tensor.rows) {
      auto& to = values.at(rows.parameter);
      STRATA_CHECK((rows.to + rows.count) * columns <= int64_t(to.size()));
      for (int64_t r = 0; r < rows.count; ++r)
        for (int64_t c = 0; c < columns; ++c)
          to[size_t((rows.to + r) * columns + c)] = from[size_t(at(tensor, rows.from + r, c))];
      filled[rows.parameter] += rows.count * columns;
    }
  }
  if (!found.empty())
    throw Error(folder + ": holds the tensor \"" + found.begin()->first + "\" (and " +
                std::to_string(found.size() - 1) + " more) that this architecture does not have.");
  for (const auto& [name, shape] : parameters)
    if (filled[name] != elements(shape)) throw Error(folder + ": does not fill the parameter \"" + name + "\".");
  return values;
}

void export_tensors(const std::string& folder, const std::string& config_json,
                    const std::vector<ExternalTensor>& mapping,
                    const std::map<std::string, std::vector<float>>& parameters) {
  std::error_code problem;
  fs::create_directories(folder, problem);
  if (problem) throw Error(folder + ": cannot make the folder: " + problem.message() + ".");
  std::vector<std::vector<float>> data;
  std::vector<TensorToStore> tensors;
  for (const ExternalTensor& tensor : mapping) {
    if (tensor.rows.empty()) continue;
    std::vector<float> values(size_t(elements(tensor.shape)));
    const int64_t columns = row_elements(tensor);
    for (const auto& rows : tensor.rows)
      for (int64_t r = 0; r < rows.count; ++r)
        for (int64_t c = 0; c < columns; ++c)
          values[size_t(at(tensor, rows.from + r, c))] =
              parameters.at(rows.parameter)[size_t((rows.to + r) * columns + c)];
    data.push_back(std::move(values));
    tensors.push_back({tensor.name, DType::f32, tensor.shape, data.back().data()});
  }
  write_safetensors((fs::path(folder) / "model.safetensors").string(), tensors, {{"format", "pt"}});
  AtomicFile config((fs::path(folder) / "config.json").string());
  config.write(config_json);
  config.commit();
}

}  // namespace strata
