// Writing safetensors; see safetensors_writer.h.
#include "engine/checkpoint/safetensors_writer.h"

#include "engine/checkpoint/interruption.h"
#include "engine/checkpoint/safetensors.h"
#include "strata/error.h"
#include "strata/json.h"

namespace strata {

SafetensorsWriter::SafetensorsWriter(const std::string& path, const SafetensorsHeader& header) : file_(path) {
  Json::Object entries, notes;
  for (const auto& [key, value] : header.metadata) notes.emplace_back(key, value);
  if (!notes.empty()) entries.emplace_back("__metadata__", notes);
  for (const auto& tensor : header.tensors) {
    const int64_t begin = missing_;
    missing_ += elements(tensor.shape) * size_of(tensor.dtype);
    entries.emplace_back(tensor.name, Json::Object{{"dtype", safetensors_name(tensor.dtype)},
                                                   {"shape", Json::Array(tensor.shape.begin(), tensor.shape.end())},
                                                   {"data_offsets", Json::Array{begin, missing_}}});
  }
  std::string text = Json(std::move(entries)).dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data begins at a multiple of 8
  const uint64_t length = text.size();
  file_.write(std::as_bytes(std::span(&length, 1)));
  file_.write(text);
}

void SafetensorsWriter::append(std::span<const std::byte> bytes) {
  constexpr size_t kBetween = 16 << 20;  // bytes between two looks for Ctrl-C
  STRATA_CHECK(int64_t(bytes.size()) <= missing_);
  missing_ -= int64_t(bytes.size());
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(kBetween, bytes.size()))) {
    stop_if_interrupted();
    file_.write(bytes.first(std::min(kBetween, bytes.size())));
  }
}

void SafetensorsWriter::commit() {
  STRATA_CHECK(missing_ == 0);
  file_.commit();
}

void write_safetensors(const std::string& path, const std::vector<TensorToStore>& tensors,
                       const std::map<std::string, std::string>& metadata,
                       const std::function<void(size_t, std::span<const std::byte>)>& written) {
  SafetensorsHeader header{{}, metadata};
  for (const TensorToStore& tensor : tensors) header.tensors.push_back({tensor.name, tensor.dtype, tensor.shape});
  SafetensorsWriter writer(path, header);
  for (size_t i = 0; i < tensors.size(); ++i)
    tensors[i].data.each(elements(tensors[i].shape) * size_of(tensors[i].dtype), [&](std::span<const std::byte> bytes) {
      writer.append(bytes);
      if (written) written(i, bytes);
    });
  writer.commit();
}

}  // namespace strata
