// Reading Hugging Face's safetensors files: 8 bytes of header length, a JSON header, the tensors' bytes
// (github.com/huggingface/safetensors, "Format"). The header is checked whole before anything it says is used; tensors
// are read piece by piece. Writing: safetensors_writer.h.
#pragma once
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "strata/tensor.h"

namespace strata {

struct StoredTensor {
  std::optional<DType> dtype;  // none: one of the format's that nothing here computes with (I64, BOOL, F8_E4M3, …)
  std::string dtype_name;      // the format's: "F32"
  Shape shape;
  size_t begin = 0, end = 0;  // in the data after the header
  size_t bytes() const { return end - begin; }
};

class SafetensorsFile {
 public:
  // Throws Error when the header is not whole, says offsets outside the file, overlaps or holes, sizes that do not
  // match shapes, or a dtype that the format does not have.
  explicit SafetensorsFile(const std::string& path);
  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  // Bytes of a tensor, from `offset` on. Throws Error (failed) when the disk does not give them. The file is open only
  // meanwhile: a checkpoint of many ranks has more files than a process may have open.
  void read(const StoredTensor& tensor, size_t offset, std::span<std::byte> out) const;
  std::vector<std::byte> read(const StoredTensor& tensor) const;  // all of them
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  size_t size_ = 0;  // of the file
  size_t data_ = 0;  // where the data begins
  std::map<std::string, StoredTensor> tensors_;
};

// What the format calls a dtype.
std::string safetensors_name(DType type);

}  // namespace strata
