// A hash, field by field; see signature.h.
#include "engine/program/signature.h"

#include <bit>
#include <functional>
#include <unordered_map>

namespace strata {
namespace {

class Hash {
 public:
  void add(uint64_t value) {
    state_ = (state_ ^ value) * 0x9e3779b97f4a7c15;
    state_ ^= state_ >> 29;
  }
  void add(const std::string& text) { add(uint64_t(std::hash<std::string>()(text))); }
  void add(const Attribute& value) {
    add(uint64_t(value.index()));
    if (const auto* integer = std::get_if<int64_t>(&value)) add(uint64_t(*integer));
    if (const auto* real = std::get_if<double>(&value)) add(std::bit_cast<uint64_t>(*real));
    if (const auto* text = std::get_if<std::string>(&value)) add(*text);
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0x2545f4914f6cdd1d;
};

// What of a tensor is a number or no list at all.
uint64_t rest_of(const Tensor& tensor) {
  return uint64_t(tensor.dtype) | uint64_t(tensor.role) << 8 | uint64_t(tensor.home) << 16 |
         uint64_t(tensor.persistent) << 24 | uint64_t(bool(tensor.part_of)) << 25;
}

uint64_t hash_of(const Tensor& tensor) {
  Hash hash;
  hash.add(rest_of(tensor) | uint64_t(tensor.shape.size()) << 32 | uint64_t(tensor.layout.size()) << 48);
  for (int64_t size : tensor.shape) hash.add(uint64_t(size));
  for (const Split& split : tensor.layout) {
    hash.add(uint64_t(split.dimension));
    hash.add(uint64_t(split.full));
    hash.add(uint64_t(split.first));
    hash.add(split.axis);
  }
  if (tensor.part_of) hash.add(uint64_t(tensor.part_offset));
  for (int64_t rows : tensor.lasting->fused) hash.add(uint64_t(rows));
  return hash.value();
}

uint64_t hash_of(const Attributes& attributes) {
  Hash hash;
  for (const auto& [name, value] : attributes.all()) {
    hash.add(name);
    hash.add(value);
  }
  return hash.value();
}

template <class OfTensor>
uint64_t hash_of(const Program& program, const Op& op, uint64_t attributes, OfTensor&& of_tensor) {
  Hash hash;
  hash.add(uint64_t(reinterpret_cast<uintptr_t>(op.kind)));
  hash.add(uint64_t(op.stream) | uint64_t(op.tier) << 8 | uint64_t(op.purpose == Purpose::again) << 16 |
           uint64_t(op.accumulate) << 32);
  hash.add(attributes);
  for (const auto* list : {&op.inputs, &op.outputs}) {
    hash.add(uint64_t(list->size()));
    for (TensorId id : *list) hash.add(id ? of_tensor(program.tensors[size_t(id.value)]) : uint64_t{1});
  }
  return hash.value();
}

// Where something with that address is remembered.
size_t slot_of(const void* address, uint64_t more, size_t slots) {
  const uint64_t mixed = (uint64_t(reinterpret_cast<uintptr_t>(address)) ^ more) * 0x9e3779b97f4a7c15;
  return size_t(mixed >> 40) % slots;
}

}  // namespace

uint64_t signature(const OpView& view) {
  return hash_of(view.program(), view.op(), hash_of(view.op().attributes),
                 [](const Tensor& tensor) { return hash_of(tensor); });
}

uint64_t Signatures::of(const Op& op) {
  return hash_of(program_, op, of_attributes(op.attributes),
                 [this](const Tensor& tensor) { return of_tensor(tensor); });
}

uint64_t Signatures::of_tensor(const Tensor& tensor) {
  const void *shape = &*tensor.shape, *layout = &*tensor.layout, *lasting = &*tensor.lasting;
  const uint64_t rest = rest_of(tensor);
  OfTensor& known = tensors_[slot_of(shape, rest, tensors_.size())];
  if (known.shape != shape || known.layout != layout || known.lasting != lasting || known.rest != rest ||
      known.part_offset != tensor.part_offset)
    known = {shape, layout, lasting, rest, hash_of(tensor), tensor.part_offset};
  return known.hash;
}

uint64_t Signatures::of_attributes(const Attributes& attributes) {
  const void* list = &attributes.all();
  OfAttributes& known = attributes_[slot_of(list, 0, attributes_.size())];
  if (known.list != list) known = {list, hash_of(attributes)};
  return known.hash;
}

std::vector<std::pair<const Op*, int64_t>> distinct_ops(const Program& program) {
  std::vector<std::pair<const Op*, int64_t>> ops;
  std::unordered_map<uint64_t, size_t> number;  // in the list
  Signatures signatures(program);
  for (const Op& op : program.ops) {
    const auto [at, is_new] = number.try_emplace(signatures.of(op), ops.size());
    if (is_new) ops.push_back({&op, 0});
    ++ops[at->second].second;
  }
  return ops;
}

}  // namespace strata
