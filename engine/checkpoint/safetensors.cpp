// Reading and writing safetensors; see safetensors.h.
#include "engine/checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "strata/json.h"
#include "strata/error.h"

namespace strata {
namespace {

constexpr uint64_t kLongestHeader = 100'000'000;  // the format's own limit

const std::map<std::string, DType>& dtypes() {
  static const std::map<std::string, DType> names = {{"F32", DType::f32}, {"F64", DType::f64}, {"BF16", DType::bf16},
                                                     {"F16", DType::f16}, {"I32", DType::i32}, {"U8", DType::u8}};
  return names;
}

std::string dtype_name(DType type) {
  for (const auto& [name, dtype] : dtypes())
    if (dtype == type) return name;
  STRATA_CHECK(!"dtype without a safetensors name");
}

StoredTensor read_entry(const Json& entry, const std::string& where, size_t data_bytes) {
  const auto field = [&](const char* key) -> const Json& {
    const Json* value = entry.find(key);
    if (!value) throw Error(where + " lacks \"" + key + "\".");
    return *value;
  };
  StoredTensor tensor;
  const std::string& dtype = field("dtype").string(where + ": dtype");
  const auto known = dtypes().find(dtype);
  if (known == dtypes().end())
    throw Error(where + " has dtype " + dtype + ", which is not read here; expected F32, F64, BF16, F16, I32 or U8.");
  tensor.dtype = known->second;
  uint64_t bytes = uint64_t(size_of(tensor.dtype));
  for (const Json& size : field("shape").array(where + ": shape")) {
    const int64_t value = size.integer(where + ": a dimension");
    if (value < 0) throw Error(where + " has a negative dimension.");
    if (value > 0 && bytes > uint64_t(std::numeric_limits<int64_t>::max()) / uint64_t(value))
      throw Error(where + " has a shape too large for any file.");
    bytes *= uint64_t(value);
    tensor.shape.push_back(value);
  }
  if (tensor.shape.empty()) tensor.shape = {1};
  const Json::Array& offsets = field("data_offsets").array(where + ": data_offsets");
  if (offsets.size() != 2) throw Error(where + ": data_offsets must be two numbers.");
  const int64_t begin = offsets[0].integer(where + ": begin"), end = offsets[1].integer(where + ": end");
  if (begin < 0 || end < begin || uint64_t(end) > data_bytes)
    throw Error(where + " lies at bytes " + std::to_string(begin) + " to " + std::to_string(end) +
                ", outside the file's " + std::to_string(data_bytes) +
                " bytes of data; the file is truncated or damaged.");
  if (uint64_t(end - begin) != bytes)
    throw Error(where + " takes " + std::to_string(end - begin) + " bytes, but its shape and dtype need " +
                std::to_string(bytes) + ".");
  tensor.begin = size_t(begin);
  tensor.end = size_t(end);
  return tensor;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  const auto bytes = file_.bytes();
  uint64_t length = 0;
  if (bytes.size() < 8)
    throw Error(path + ": is no safetensors file: it has " + std::to_string(bytes.size()) + " bytes.");
  std::memcpy(&length, bytes.data(), 8);
  if (length > kLongestHeader || length > bytes.size() - 8)
    throw Error(path + ": is no safetensors file, or truncated: its header claims " + std::to_string(length) +
                " bytes, the file has " + std::to_string(bytes.size()) + ".");
  const Json header = Json::parse({reinterpret_cast<const char*>(bytes.data()) + 8, size_t(length)}, path);
  data_ = bytes.subspan(8 + size_t(length));
  std::vector<std::pair<size_t, size_t>> ranges;
  for (const auto& [name, entry] : header.object(path + ": the header")) {
    if (name == "__metadata__") continue;
    const StoredTensor tensor = read_entry(entry, path + ": tensor \"" + name + "\"", data_.size());
    ranges.emplace_back(tensor.begin, tensor.end);
    tensors_[name] = tensor;
  }
  std::sort(ranges.begin(), ranges.end());
  size_t at = 0;
  for (const auto& [begin, end] : ranges) {
    if (begin != at)
      throw Error(path + ": tensors " + (begin < at ? "overlap" : "leave a hole") + " at byte " +
                  std::to_string(std::min(begin, at)) + " of the data.");
    at = end;
  }
  if (at != data_.size())
    throw Error(path + ": " + std::to_string(data_.size() - at) + " bytes at its end belong to no tensor.");
}

void write_safetensors(const std::string& path, const std::vector<TensorToStore>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  Json::Object header, notes;
  for (const auto& [key, value] : metadata) notes.emplace_back(key, value);
  if (!notes.empty()) header.emplace_back("__metadata__", notes);
  int64_t offset = 0;
  for (const TensorToStore& tensor : tensors) {
    const int64_t end = offset + elements(tensor.shape) * size_of(tensor.dtype);
    header.emplace_back(tensor.name, Json::Object{{"dtype", dtype_name(tensor.dtype)},
                                                  {"shape", Json::Array(tensor.shape.begin(), tensor.shape.end())},
                                                  {"data_offsets", Json::Array{offset, end}}});
    offset = end;
  }
  std::string text = Json(std::move(header)).dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data begins at a multiple of 8
  const uint64_t length = text.size();
  AtomicFile file(path);
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(text);
  for (const TensorToStore& tensor : tensors)
    file.write(
        {static_cast<const std::byte*>(tensor.data.get()), size_t(elements(tensor.shape) * size_of(tensor.dtype))});
  file.commit();
}

}  // namespace strata
