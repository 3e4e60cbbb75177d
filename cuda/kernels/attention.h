// Sizes of an attention op, on host and device. The last dimension of qkv holds, for each group, its query heads, its
// key and its value.
#pragma once
#include <cmath>

#include "cuda/bind.h"

namespace strata::cuda::attention_kernels {

struct Sizes {
  int time, queries, size, width, groups, heads;
  float scale;
  Sizes(const OpView& v, const Tensor& qkv)
      : time(int(qkv.shape[1])),
        queries(int(v.attributes().integer("queries_per_group"))),
        size(int(v.attributes().integer("head_size"))),
        width(int(qkv.shape[2])),
        groups(width / ((queries + 2) * size)),
        heads(groups * queries),
        scale(float(1 / std::sqrt(double(size)))) {
    require(size <= 256, v, "heads of at most 256 on the cuda backend");
  }
  STRATA_DEVICE int per_group() const { return queries; }
  STRATA_DEVICE int query(int head) const {
    return (head / per_group() * (per_group() + 2) + head % per_group()) * size;
  }
  STRATA_DEVICE int key(int group) const { return (group * (per_group() + 2) + per_group()) * size; }
  STRATA_DEVICE int value(int group) const { return key(group) + size; }
};

}  // namespace strata::cuda::attention_kernels
