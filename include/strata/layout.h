// Which elements of a whole tensor a rank holds: the one place where layouts (tensor.h) become indices. Checkpoints,
// first values and stochastic rounding all ask here, so that they agree under every layout.
#pragma once
#include <cstdint>
#include <functional>

#include "strata/communicator.h"
#include "strata/tensor.h"

#ifdef __CUDACC__
#define STRATA_EVERYWHERE __host__ __device__
#else
#define STRATA_EVERYWHERE
#endif

namespace strata {

class OpView;

// A block of a tensor: by dimension, where it begins and how much of it there is, in elements.
struct Box {
  Shape offset, extent;
  bool operator==(const Box&) const = default;
};

// What this rank holds of the whole tensor, whose shape is `tensor.full_shape()`. While planning: what coordinate 0 of
// every axis holds. For tensors that are one box: not those with pairs of chunks (Split::pair).
Box box_of(const Tensor& tensor);
// Of the splits of a tensor over an axis along a dimension, the last if it is the last of that dimension, too: what
// exchanges over the axis undo. Null when there is none.
const Split* last_split(const Tensor& tensor, int dimension, const std::string& axis);
// For shape rules of kinds whose output `o` is a rank's share of a dimension of `full`: how many of it the rank has,
// as the output's layout says (once planning is over); until then what the first rank has, which is the most.
int64_t share_of_output(const OpView& view, int o, int dimension, const std::string& axis, int64_t full, int size);
// The share of a rank of `size` in what a split divides: of pairs the first chunk begins it, both count.
Range share_of(const Split& split, int rank, int size);
// All of a tensor of that shape.
Box whole_box(const Shape& shape);
bool overlap(const Box& a, const Box& b);

// Which indices of one dimension of the whole tensor a rank holds: a run of them, or two. Plain data, for kernels.
struct Indices {
  int64_t first = 0;
  int64_t fold = int64_t{1} << 62;  // from this local index on, `jump` more
  int64_t jump = 0;

  Indices() = default;
  Indices(const Tensor& tensor, int dimension);
  STRATA_EVERYWHERE int64_t operator()(int64_t local) const { return first + local + (local >= fold ? jump : 0); }
  // Local indices [0, extent) as runs of neighbours: run(local, global, count).
  template <class Run>
  void runs(int64_t extent, Run&& run) const {
    const int64_t front = fold < extent ? fold : extent;
    if (front > 0) run(int64_t{0}, first, front);
    if (front < extent) run(front, (*this)(front), extent - front);
  }
};

// From the index of an element within a box (row-major) to its index in the whole tensor. Plain data, so that kernels
// take it by value; dimensions that are whole have been merged with the one before. Of pairs of chunks it knows, too.
struct GlobalIndex {
  static constexpr int kDimensions = 6;
  int dimensions = 1;
  int64_t first = 0;                  // index of the box's first element
  int64_t extent[kDimensions] = {1};  // outermost first, of the box
  int64_t stride[kDimensions] = {1};  // in the whole tensor; the innermost is 1

  int folded = -1;             // the dimension that is two chunks, if one is
  int64_t fold = 0, jump = 0;  // where the second begins in it, and what is between them in the whole tensor

  GlobalIndex() = default;
  // Throws Error for a box of more than kDimensions dimensions that cannot be merged.
  GlobalIndex(const Box& box, const Shape& whole);
  explicit GlobalIndex(const Tensor& tensor);

  STRATA_EVERYWHERE int64_t operator()(int64_t local) const {
    int64_t global = first;
    for (int d = dimensions - 1; d > 0; --d) {
      const int64_t at = local % extent[d];
      global += at * stride[d] + (d == folded && at >= fold ? jump : 0);
      local /= extent[d];
    }
    return global + local * stride[0] + (folded == 0 && local >= fold ? jump : 0);
  }
  // Calls run(local, global, count) for the elements [begin, end) of the box, in runs that are contiguous in the whole
  // tensor too.
  template <class Run>
  void runs(int64_t begin, int64_t end, Run&& run) const {
    const int64_t inner = extent[dimensions - 1];
    while (begin < end) {
      const int64_t at = dimensions == 1 ? begin : begin % inner;
      int64_t left = dimensions == 1 ? end - begin : inner - at;
      if (folded == dimensions - 1 && at < fold && fold - at < left) left = fold - at;
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
