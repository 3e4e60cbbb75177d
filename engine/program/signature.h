// One number for all that shape, cost and kernel rules can see of an op, so that planning asks a rule once for ops that
// are the same for it: the copies of an op for many microbatches.
#pragma once
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "strata/op_kind.h"

namespace strata {

// Of two ops, equal numbers mean equal kinds, attributes, addends, streams and tiers, and equal shapes, types, roles,
// layouts and places of their tensors (but for a chance of 2^-64). Names, ids, blocks and microbatches do not count.
uint64_t signature(const OpView& view);

// The same of one op after the other, of a program that does not change meanwhile: what copies share is looked at once.
class Signatures {
 public:
  explicit Signatures(const Program& program) : program_(program) {}
  uint64_t of(const Op& op);

 private:
  // Of the tensor and of the attributes that were last seen at a place by address.
  struct OfTensor {
    const void *shape = nullptr, *layout = nullptr, *lasting = nullptr;
    uint64_t rest = 0, hash = 0;
    int64_t part_offset = 0;
  };
  struct OfAttributes {
    const void* list = nullptr;
    uint64_t hash = 0;
  };
  uint64_t of_tensor(const Tensor& tensor);
  uint64_t of_attributes(const Attributes& attributes);

  const Program& program_;
  std::array<OfTensor, 1024> tensors_{};
  std::array<OfAttributes, 1024> attributes_{};
};

// The ops of a program that a rule can tell apart, each with how often it is there, in the order of the first of them.
std::vector<std::pair<const Op*, int64_t>> distinct_ops(const Program& program);

}  // namespace strata
