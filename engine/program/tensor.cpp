// Names and sizes of the enumerations in tensor.h and program.h.
#include "strata/tensor.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "strata/error.h"
#include "strata/program.h"

namespace strata {

int64_t size_of(DType type) {
  switch (type) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f64:
      return 8;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::u8:
      return 1;
  }
  STRATA_CHECK(!"dtype");
}

std::string_view name_of(DType type) {
  constexpr std::string_view names[] = {"f32", "f64", "bf16", "f16", "i32", "u8"};
  return names[int(type)];
}

constexpr uint32_t kMost = 0x7fffffff;  // ids in a list

TensorId* TensorIds::elsewhere() const {
  TensorId* ids;
  std::memcpy(&ids, inside_, sizeof ids);
  return ids;
}

void TensorIds::reserve(size_t capacity) {
  if (capacity <= this->capacity()) return;
  capacity = std::max(capacity, 2 * this->capacity());
  TensorId* const ids = new TensorId[capacity];
  std::copy(begin(), end(), ids);
  if (!is_inside()) delete[] elsewhere();
  std::memcpy(static_cast<void*>(inside_), &ids, sizeof ids);
  inside_[2].value = int32_t(capacity);
  outside_ = 1;
}

void TensorIds::check(size_t i) const {
  if (i >= size_)
    throw std::out_of_range("tensor " + std::to_string(i) + " of an op that has " + std::to_string(size_));
}

void TensorIds::resize(size_t size) {
  reserve(size);
  if (size > size_) std::fill(begin() + size_, begin() + size, TensorId{});
  size_ = uint32_t(size) & kMost;
}

TensorId* TensorIds::insert(const TensorId* at, const TensorId* first, const TensorId* last) {
  const size_t index = size_t(at - begin()), count = size_t(last - first);
  reserve(size_ + count);
  TensorId* const place = begin() + index;
  std::copy_backward(place, begin() + size_, begin() + size_ + count);
  std::copy(first, last, place);
  size_ = uint32_t(size_ + count) & kMost;
  return place;
}

TensorId* TensorIds::erase(const TensorId* first, const TensorId* last) {
  TensorId* const place = begin() + (first - begin());
  std::copy(last, static_cast<const TensorId*>(end()), place);
  size_ = uint32_t(size_ - size_t(last - first)) & kMost;
  return place;
}

bool operator==(const TensorIds& a, const TensorIds& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

Shape Tensor::full_shape() const {
  Shape full = shape;
  for (size_t i = layout.size(); i-- > 0;)  // of several splits of a dimension the first divides the whole
    full[size_t(layout[i].dimension)] = layout[i].full;
  return full;
}

std::string_view name_of(Role role) {
  constexpr std::string_view names[] = {"parameters", "gradients", "optimizer_state", "activations",
                                        "data",       "scalars",   "workspace"};
  return names[int(role)];
}

std::string_view name_of(Tier tier) {
  constexpr std::string_view names[] = {"device", "host", "nvme"};
  return names[int(tier)];
}

std::string_view name_of(Purpose purpose) {
  constexpr std::string_view names[] = {"work", "rest", "restore", "again"};
  return names[int(purpose)];
}

std::string_view name_of(Stream stream) {
  constexpr std::string_view names[] = {"compute", "host",     "to_device",      "to_host", "read",
                                        "write",   "exchange", "model_exchange", "send",    "receive"};
  static_assert(std::size(names) == kStreams);
  return names[int(stream)];
}

std::string_view name_of(StepPart part) {
  constexpr std::string_view names[] = {"load", "forward", "backward", "reduce", "update", "publish"};
  return names[int(part)];
}

bool countable(const Shape& shape) {
  int64_t product = 1;
  for (int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(product, size, &product) || product > kMostElements) return false;
  return true;
}

int64_t elements(const Shape& shape) {
  int64_t product = 1;
  for (int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(product, size, &product) || product > kMostElements)
      throw Error("a tensor of shape " + text(shape) + " has more than the " + std::to_string(kMostElements) +
                  " elements that a tensor may have.");
  return product;
}

std::string text(const Shape& shape) {
  std::string result = "(";
  for (size_t i = 0; i < shape.size(); ++i) result += (i ? ", " : "") + std::to_string(shape[i]);
  return result + ")";
}

std::string text(const Shape& shape, const Dimensions& dimensions) {
  if (dimensions.size() != shape.size()) return text(shape);
  std::string result = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    const auto& [name, unit] = dimensions[i];
    result += (i ? ", " : "") + name + " ";
    result += unit > 1 && shape[i] % unit == 0 ? std::to_string(shape[i] / unit) + " x " + std::to_string(unit)
                                               : std::to_string(shape[i]);
  }
  return result + ")";
}

void require_names_fit(const Tensor& tensor) {
  if (tensor.dimensions.empty()) return;
  Shape of_parts;
  if (!tensor.layout.empty()) of_parts = tensor.full_shape();
  const Shape& full = tensor.layout.empty() ? *tensor.shape : of_parts;
  if (tensor.dimensions.size() != full.size())
    throw Error("tensor " + tensor.name + " of shape " + text(full) + " has names for " +
                std::to_string(tensor.dimensions.size()) + " dimensions; give each one or none.");
  for (size_t d = 0; d < full.size(); ++d) {
    const Dimension& dimension = tensor.dimensions[d];
    if (dimension.name.empty() || dimension.unit < 1 || full[d] % dimension.unit != 0)
      throw Error("tensor " + tensor.name + ": dimension " + std::to_string(d) + ", \"" + dimension.name + "\", of " +
                  std::to_string(full[d]) + " elements does not hold a whole number of units of " +
                  std::to_string(dimension.unit) + ".");
  }
}

std::string bytes_text(int64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = double(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 5) value /= 1024, ++unit;
  char text[32];
  std::snprintf(text, sizeof text, unit ? "%.2f %s" : "%.0f %s", value, units[unit]);
  return text;
}

}  // namespace strata
