// Reading safetensors; see safetensors.h.
#include "engine/checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "memory/input_file.h"
#include "strata/error.h"
#include "strata/json.h"

namespace strata {
namespace {

constexpr uint64_t kLongestHeader = 100'000'000;  // the format's own limit

struct StoredType {
  std::optional<DType> dtype;
  int bits;
};

const std::map<std::string, StoredType>& dtypes() {
  static const std::map<std::string, StoredType> names = {
      {"F32", {DType::f32, 32}}, {"F64", {DType::f64, 64}}, {"BF16", {DType::bf16, 16}}, {"F16", {DType::f16, 16}},
      {"I32", {DType::i32, 32}}, {"U8", {DType::u8, 8}},    {"I64", {{}, 64}},           {"U64", {{}, 64}},
      {"U32", {{}, 32}},         {"I16", {{}, 16}},         {"U16", {{}, 16}},           {"I8", {{}, 8}},
      {"BOOL", {{}, 8}},         {"C64", {{}, 64}},         {"F8_E4M3", {{}, 8}},        {"F8_E5M2", {{}, 8}},
      {"F8_E8M0", {{}, 8}},      {"F6_E2M3", {{}, 6}},      {"F6_E3M2", {{}, 6}},        {"F4", {{}, 4}}};
  return names;
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
  if (known == dtypes().end()) throw Error(where + " has dtype " + dtype + ", which safetensors files do not have.");
  tensor.dtype = known->second.dtype;
  tensor.dtype_name = dtype;
  uint64_t bits = uint64_t(known->second.bits);
  for (const Json& size : field("shape").array(where + ": shape")) {
    const int64_t value = size.integer(where + ": a dimension");
    if (value < 0) throw Error(where + " has a negative dimension.");
    if (value > 0 && bits > uint64_t(std::numeric_limits<int64_t>::max()) / uint64_t(value))
      throw Error(where + " has a shape too large for any file.");
    bits *= uint64_t(value);
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
  const uint64_t bytes = (bits + 7) / 8;
  if (uint64_t(end - begin) != bytes)
    throw Error(where + " takes " + std::to_string(end - begin) + " bytes, but its shape and dtype need " +
                std::to_string(bytes) + ".");
  tensor.begin = size_t(begin);
  tensor.end = size_t(end);
  return tensor;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  const InputFile file(path);
  size_ = file.size();
  uint64_t length = 0;
  if (size_ < 8) throw Error(path + ": is no safetensors file: it has " + std::to_string(size_) + " bytes.");
  file.read_at(0, std::as_writable_bytes(std::span(&length, 1)));
  if (length > kLongestHeader || length > size_ - 8)
    throw Error(path + ": is no safetensors file, or truncated: its header claims " + std::to_string(length) +
                " bytes, the file has " + std::to_string(size_) + ".");
  std::string text(size_t(length), '\0');
  file.read_at(8, std::as_writable_bytes(std::span(text)));
  const Json header = Json::parse(text, path);
  data_ = 8 + size_t(length);
  const size_t data_bytes = size_ - data_;
  std::vector<std::pair<size_t, size_t>> ranges;
  for (const auto& [name, entry] : header.object(path + ": the header")) {
    if (name == "__metadata__") continue;
    const StoredTensor tensor = read_entry(entry, path + ": tensor \"" + name + "\"", data_bytes);
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
  if (at != data_bytes)
    throw Error(path + ": " + std::to_string(data_bytes - at) + " bytes at its end belong to no tensor.");
}

void SafetensorsFile::read(const StoredTensor& tensor, size_t offset, std::span<std::byte> out) const {
  STRATA_CHECK(offset <= tensor.bytes() && out.size() <= tensor.bytes() - offset);
  const InputFile file(path_);
  if (file.size() != size_)
    throw Error(path_ + ": has changed while it was in use: it had " + std::to_string(size_) + " bytes, now " +
                    std::to_string(file.size()) + ".",
                ExitCode::failed);
  file.read_at(data_ + tensor.begin + offset, out);
}

std::vector<std::byte> SafetensorsFile::read(const StoredTensor& tensor) const {
  std::vector<std::byte> bytes(tensor.bytes());
  read(tensor, 0, bytes);
  return bytes;
}

std::string safetensors_name(DType type) {
  for (const auto& [name, stored] : dtypes())
    if (stored.dtype == type) return name;
  STRATA_CHECK(!"dtype without a safetensors name");
}

}  // namespace strata
