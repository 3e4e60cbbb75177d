// A whole tensor in memory, cut along any dimension into the shares of the ranks of an axis: where each share's pieces
// are, for exchanges. A share whose pieces would be many or small is packed into a workspace first.
#pragma once
#include <cstddef>
#include <string>

#include "strata/communicator.h"
#include "strata/layout.h"
#include "strata/op_kind.h"

namespace strata {

// The dimension that an exchange cuts: its attribute, by default the first.
inline int dimension_of(const OpView& view, std::string_view attribute = "dimension") {
  return int(view.attributes().integer(attribute, 0));
}

inline std::string axis_of(const OpView& view) { return view.attributes().string("axis"); }

// The layout without that split, and with one more.
Layout without_split(const Tensor& tensor, int dimension, const std::string& axis);
Layout with_split(Layout layout, int dimension, const std::string& axis, int64_t full);

// The row of the whole tensor that this rank's first one is, without allocating: kernels ask.
inline int64_t first_row(const Tensor& tensor) {
  int64_t first = 0;
  for (const Split& split : tensor.layout)
    if (split.dimension == 0) first += split.first;
  return first;
}

class Shares {
 public:
  // When a share is packed: where its pieces are many or short, or where it is not one piece.
  enum Packing { many_or_short, in_one_piece };
  // `room`: where shares are packed, as many bytes as the whole tensor; not used where they are not.
  Shares(std::byte* data, const Shape& shape, int dimension, DType dtype, std::byte* room,
         Packing packing = many_or_short);
  // The bytes for that: 0 or those of the whole tensor.
  static int64_t room_for(const Shape& shape, int dimension, DType dtype, Packing packing = many_or_short);

  bool packed() const { return packed_; }
  // Of rank `rank` of `size`: where its share is, packed if it is to be.
  void add_to(Pieces& pieces, int rank, int size) const;
  // Between the tensor and the room, for one rank's share; nothing where it is not packed.
  void pack(Communicator& group, int rank, int size) const;
  void unpack(Communicator& group, int rank, int size) const;
  // From or to a share that lies in one piece somewhere else.
  void put(Communicator& group, int rank, int size, const std::byte* share) const;

 private:
  struct Place {
    std::byte *strided, *room;
    int64_t bytes;  // of one of the outer_ pieces
  };
  Place place(int rank, int size) const;
  std::byte *data_, *room_;
  int64_t outer_, count_, inner_;  // pieces of a share; size of the dimension; bytes of one of it
  bool packed_;
};

// The workspace of an exchange of several tensors: each gets its room, aligned.
int64_t aligned_room(int64_t bytes);

}  // namespace strata
