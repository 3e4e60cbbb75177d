// Which elements of a whole tensor a rank holds: the one place where layouts (tensor.h) become indices. Checkpoints,
// first values and stochastic rounding all ask here, so that they agree under every layout.
#pragma once
#include <cstdint>
#include <functional>

#include "strata/tensor.h"

#ifdef __CUDACC__
#define STRATA_EVERYWHERE __host__ __device__
#else
#define STRATA_EVERYWHERE
#endif

namespace strata {

// A block of a tensor: by dimension, where it begins and how much of it there is, in elements.
struct Box {
  Shape offset, extent;
  bool operator==(const Box&) const = default;
};

// What this rank holds of the whole tensor, whose shape is `tensor.full_shape()`. While planning: what coordinate 0 of
// every axis holds.
Box box_of(const Tensor& tensor);
// All of a tensor of that shape.
Box whole_box(const Shape& shape);
bool overlap(const Box& a, const Box& b);

// From the index of an element within a box (row-major) to its index in the whole tensor. Plain data, so that kernels
// take it by value; dimensions that are whole have been merged with the one before.
struct GlobalIndex {
  static constexpr int kDimensions = 6;
  int dimensions = 1;
  int64_t first = 0;                  // index of the box's first element
  int64_t extent[kDimensions] = {1};  // outermost first, of the box
  int64_t stride[kDimensions] = {1};  // in the whole tensor; the innermost is 1

  GlobalIndex() = default;
  // Throws Error for a box of more than kDimensions dimensions that cannot be merged.
  GlobalIndex(const Box& box, const Shape& whole);
  explicit GlobalIndex(const Tensor& tensor) : GlobalIndex(box_of(tensor), tensor.full_shape()) {}

  STRATA_EVERYWHERE int64_t operator()(int64_t local) const {
    int64_t global = first;
    for (int d = dimensions - 1; d > 0; --d) {
      global += local % extent[d] * stride[d];
      local /= extent[d];
    }
    return global + local * stride[0];
  }
  // Calls run(local, global, count) for the elements [begin, end) of the box, in runs that are contiguous in the whole
  // tensor too.
  template <class Run>
  void runs(int64_t begin, int64_t end, Run&& run) const {
    const int64_t inner = extent[dimensions - 1];
    while (begin < end) {
      const int64_t left = dimensions == 1 ? end - begin : inner - begin % inner;
      const int64_t count = left < end - begin ? left : end - begin;
      run(begin, (*this)(begin), count);
      begin += count;
    }
  }
};

// Calls copy(from, to, count), indices of elements, for every run of elements that two boxes of one tensor share:
// `from` counts row-major within `source`, `to` within `target`.
void for_common(const Box& source, const Box& target,
                const std::function<void(int64_t from, int64_t to, int64_t count)>& copy);

}  // namespace strata
