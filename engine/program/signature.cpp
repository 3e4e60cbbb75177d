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
  void add(const Tensor& tensor) {
    add(uint64_t(tensor.dtype) | uint64_t(tensor.role) << 8 | uint64_t(tensor.home) << 16 |
        uint64_t(tensor.persistent) << 24 | uint64_t(bool(tensor.part_of)) << 25 | uint64_t(tensor.shape.size()) << 32 |
        uint64_t(tensor.layout.size()) << 48);
    for (int64_t size : tensor.shape) add(uint64_t(size));
    for (const Split& split : tensor.layout) {
      add(uint64_t(split.dimension));
      add(uint64_t(split.full));
      add(uint64_t(split.first));
      add(split.axis);
    }
    if (tensor.part_of) add(uint64_t(tensor.part_offset));
    for (int64_t rows : tensor.lasting->fused) add(uint64_t(rows));
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0x2545f4914f6cdd1d;
};

}  // namespace

uint64_t signature(const OpView& view) {
  const Op& op = view.op();
  Hash hash;
  hash.add(uint64_t(reinterpret_cast<uintptr_t>(op.kind)));
  hash.add(uint64_t(op.stream) | uint64_t(op.tier) << 8 | uint64_t(op.accumulate) << 32);
  for (const auto& [name, value] : op.attributes.all()) {
    hash.add(name);
    hash.add(value);
  }
  for (const auto* list : {&op.inputs, &op.outputs}) {
    hash.add(uint64_t(list->size()));
    for (TensorId id : *list)
      if (id)
        hash.add(view.program().tensors[size_t(id.value)]);
      else
        hash.add(uint64_t{1});
  }
  return hash.value();
}

std::vector<std::pair<const Op*, int64_t>> distinct_ops(const Program& program) {
  std::vector<std::pair<const Op*, int64_t>> ops;
  std::unordered_map<uint64_t, size_t> number;  // in the list
  for (const Op& op : program.ops) {
    const auto [at, is_new] = number.try_emplace(signature(OpView(program, op)), ops.size());
    if (is_new) ops.push_back({&op, 0});
    ++ops[at->second].second;
  }
  return ops;
}

}  // namespace strata
