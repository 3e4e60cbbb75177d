// Hugging Face's safetensors files: 8 bytes of header length, a JSON header, the tensors' bytes
// (github.com/huggingface/safetensors, "Format"). The header is checked whole before anything it says is used.
#pragma once
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "memory/atomic_file.h"
#include "memory/mapped_file.h"
#include "strata/tensor.h"

namespace strata {

struct StoredTensor {
  DType dtype = DType::f32;
  Shape shape;
  size_t begin = 0, end = 0;  // in the data after the header
};

class SafetensorsFile {
 public:
  // Throws Error when the header is not whole, says offsets outside the file, overlaps or holes, sizes that do not
  // match shapes, or a dtype that is not read here (I64, BOOL, F8…).
  explicit SafetensorsFile(const std::string& path);
  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  std::span<const std::byte> data(const StoredTensor& tensor) const {
    return data_.subspan(tensor.begin, tensor.end - tensor.begin);
  }
  const std::string& path() const { return file_.path(); }

 private:
  MappedFile file_;
  std::span<const std::byte> data_;
  std::map<std::string, StoredTensor> tensors_;
};

// A tensor's bytes, in memory or brought there when asked for; those are valid until the next one is asked for.
class TensorBytes {
 public:
  TensorBytes(const void* data) : data_(data) {}
  TensorBytes(std::function<const void*()> load) : load_(std::move(load)) {}
  const void* get() const { return load_ ? load_() : data_; }

 private:
  const void* data_ = nullptr;
  std::function<const void*()> load_;
};

struct TensorToStore {
  std::string name;
  DType dtype;
  Shape shape;
  TensorBytes data;  // of elements(shape) · size_of(dtype) bytes
};

// Writes one file, whole or not at all. `metadata` goes into "__metadata__".
void write_safetensors(const std::string& path, const std::vector<TensorToStore>& tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace strata
