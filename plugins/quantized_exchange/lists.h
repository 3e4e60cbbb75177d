// Where the codes of each rank's rows of gathered parameters lie in the workspace of a gather: the same for the kernels
// of all backends, of which some are in libraries of their own, so all is inline. What codes are: codes.h.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "plugins/quantized_exchange/codes.h"
#include "strata/communicator.h"
#include "strata/op_kind.h"

namespace strata::quantized {

// The codes of one rank's rows of one tensor: where they are, and what they are of.
struct List {
  int rank, tensor;
  int64_t offset, bytes;    // of the codes
  int64_t first, elements;  // in the whole tensor
};

// Of an op with attributes size and format, whose outputs are the whole tensors. Those of a rank are neighbours, so
// that they cross as one piece.
inline std::vector<List> lists_of(const OpView& v) {
  const Format format = format_of(v.attributes().string("format"));
  const int ranks = int(v.attributes().integer("size"));
  std::vector<List> lists;
  int64_t offset = 0;
  for (int rank = 0; rank < ranks; ++rank)
    for (int i = 0; i < v.outputs(); ++i) {
      const Shape& shape = v.output(i).shape;
      const Range rows = share_of(shape[0], rank, ranks);
      const int64_t row = elements(shape) / std::max<int64_t>(1, shape[0]),
                    bytes = packed_bytes(format, rows.count() * row);
      lists.push_back({rank, i, offset, bytes, rows.begin * row, rows.count() * row});
      offset += bytes;
    }
  return lists;
}
inline int64_t bytes_of(const std::vector<List>& lists) {
  return lists.empty() ? 0 : lists.back().offset + lists.back().bytes;
}

// What each rank gives the others, in the workspace.
inline std::vector<Pieces> pieces_of(const std::vector<List>& lists, int64_t ranks, std::byte* codes) {
  std::vector<Pieces> parts(static_cast<size_t>(ranks));
  for (const List& list : lists) parts[size_t(list.rank)].add({codes + list.offset, list.bytes});
  return parts;
}

}  // namespace strata::quantized
