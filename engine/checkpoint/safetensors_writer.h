// Writing safetensors files: the header first, then the tensors' bytes in the header's order, in pieces of any size.
#pragma once
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "memory/atomic_file.h"
#include "strata/tensor.h"

namespace strata {

struct SafetensorsHeader {
  struct Tensor {
    std::string name;
    DType dtype;
    Shape shape;
  };
  std::vector<Tensor> tensors;
  std::map<std::string, std::string> metadata;  // goes into "__metadata__"
};

// Nothing has the file's name before commit.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, const SafetensorsHeader& header);
  void append(std::span<const std::byte> bytes);
  void commit();  // after exactly the bytes that the header promised

 private:
  AtomicFile file_;
  int64_t missing_ = 0;
};

// A tensor's bytes, in memory or brought there piece by piece when asked for.
class TensorBytes {
 public:
  using Take = std::function<void(std::span<const std::byte>)>;
  TensorBytes(const void* data) : data_(data) {}
  // `pieces` calls what it is given with one piece after the other; each is valid until that returns.
  TensorBytes(std::function<void(const Take&)> pieces) : pieces_(std::move(pieces)) {}
  // `bytes`: of the whole tensor.
  void each(int64_t bytes, const Take& take) const {
    if (pieces_)
      pieces_(take);
    else
      take({static_cast<const std::byte*>(data_), size_t(bytes)});
  }

 private:
  const void* data_ = nullptr;
  std::function<void(const Take&)> pieces_;
};

struct TensorToStore {
  std::string name;
  DType dtype;
  Shape shape;
  TensorBytes data;  // of elements(shape) · size_of(dtype) bytes
};

// Writes one file, whole or not at all. Each tensor is asked for once; `written` sees its bytes,
// piece by piece, with its index in `tensors`.
void write_safetensors(const std::string& path, const std::vector<TensorToStore>& tensors,
                       const std::map<std::string, std::string>& metadata,
                       const std::function<void(size_t, std::span<const std::byte>)>& written = {});

}  // namespace strata
