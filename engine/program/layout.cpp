// Boxes and indices from layouts (strata/layout.h).
#include "strata/layout.h"

#include <algorithm>

#include "strata/error.h"

namespace strata {

Box whole_box(const Shape& shape) { return {Shape(shape.size(), 0), shape}; }

Box box_of(const Tensor& tensor) {
  Box box = whole_box(tensor.shape);
  // Splits nest: what a later one divides begins where the earlier ones left off.
  for (const Split& split : tensor.layout) {
    STRATA_CHECK(split.pair == 0);
    box.offset[size_t(split.dimension)] += split.first;
  }
  return box;
}

Range share_of(const Split& split, int rank, int size) {
  if (split.pair == 0) return share_of(split.full, rank, size);
  return {rank * split.pair, (rank + 2) * split.pair};
}

Indices::Indices(const Tensor& tensor, int dimension) {
  const Split* pair = nullptr;
  int64_t within = 0;  // of the pair's share, what later splits leave out before this rank's part
  for (const Split& split : tensor.layout) {
    if (split.dimension != dimension) continue;
    STRATA_CHECK(split.pair == 0 || (!pair && first == 0));
    if (split.pair > 0)
      pair = &split;
    else
      (pair ? within : first) += split.first;
  }
  if (!pair) return;
  const int64_t back = pair->full - pair->first - pair->pair;
  first = within < pair->pair ? pair->first + within : back + within - pair->pair;
  if (within >= pair->pair) return;
  fold = pair->pair - within;
  jump = back - pair->first - pair->pair;
}

GlobalIndex::GlobalIndex(const Tensor& tensor) {
  const Shape whole = tensor.full_shape();
  Box box = whole_box(tensor.shape);
  int dimension = -1;  // that is two chunks
  Indices chunks;
  for (size_t d = 0; d < whole.size(); ++d) {
    const Indices indices(tensor, int(d));
    box.offset[d] = indices.first;
    if (indices.jump == 0 || indices.fold >= box.extent[d]) continue;
    STRATA_CHECK(dimension < 0);
    dimension = int(d), chunks = indices;
  }
  *this = GlobalIndex(box, whole);
  if (dimension < 0) return;
  // It is not whole, so of the dimensions that it was merged with it is the outermost.
  int64_t step = 1;
  folded = dimensions;
  for (size_t d = whole.size(); d-- > size_t(dimension);) {
    if (d + 1 == whole.size() || box.extent[d + 1] != whole[d + 1]) --folded;
    if (d > size_t(dimension)) step *= whole[d];
  }
  fold = chunks.fold * (step / stride[folded]);
  jump = chunks.jump * step;
}

bool overlap(const Box& a, const Box& b) {
  for (size_t d = 0; d < a.extent.size(); ++d)
    if (std::max(a.offset[d], b.offset[d]) >= std::min(a.offset[d] + a.extent[d], b.offset[d] + b.extent[d]))
      return false;
  return true;
}

GlobalIndex::GlobalIndex(const Box& box, const Shape& whole) : dimensions(0) {
  STRATA_CHECK(box.extent.size() == whole.size() && !whole.empty());
  int64_t step = 1;  // elements of the whole tensor between neighbours along a dimension
  // From the innermost dimension outwards, then turned around.
  for (size_t d = whole.size(); d-- > 0; step *= whole[d]) {
    first += box.offset[d] * step;
    const bool merges = dimensions > 0 && box.extent[d + 1] == whole[d + 1];
    if (merges) {
      extent[dimensions - 1] *= box.extent[d];
      continue;
    }
    STRATA_CHECK(dimensions < kDimensions);
    extent[dimensions] = box.extent[d];
    stride[dimensions++] = step;
  }
  std::reverse(extent, extent + dimensions);
  std::reverse(stride, stride + dimensions);
}

void for_common(const Box& source, const Box& target,
                const std::function<void(int64_t from, int64_t to, int64_t count)>& copy) {
  if (!overlap(source, target)) return;
  const size_t rank = source.extent.size();
  // The innermost dimensions that both hold alike and whole in each other are one run.
  std::vector<int64_t> begin(rank), count(rank), from(rank), to(rank);  // from, to: strides within the boxes
  int64_t source_step = 1, target_step = 1;
  for (size_t d = rank; d-- > 0;) {
    begin[d] = std::max(source.offset[d], target.offset[d]);
    count[d] = std::min(source.offset[d] + source.extent[d], target.offset[d] + target.extent[d]) - begin[d];
    from[d] = source_step, to[d] = target_step;
    source_step *= source.extent[d], target_step *= target.extent[d];
  }
  size_t outer = rank - 1;  // dimensions before it are walked; it and those after are one run
  int64_t run = count[outer];
  while (outer > 0 && count[outer] == source.extent[outer] && count[outer] == target.extent[outer])
    run *= count[--outer];
  int64_t source_at = 0, target_at = 0;
  for (size_t d = 0; d < rank; ++d) {
    source_at += (begin[d] - source.offset[d]) * from[d];
    target_at += (begin[d] - target.offset[d]) * to[d];
  }
  std::vector<int64_t> index(outer, 0);
  for (;;) {
    copy(source_at, target_at, run);
    size_t d = outer;
    while (d > 0) {
      --d;
      source_at += from[d], target_at += to[d];
      if (++index[d] < count[d]) break;
      source_at -= from[d] * count[d], target_at -= to[d] * count[d];
      index[d] = 0;
      if (d == 0) return;
    }
    if (outer == 0) return;
  }
}

}  // namespace strata
