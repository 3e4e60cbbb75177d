// Pieces of shares; see shares.h.
#include "engine/ops/shares.h"

namespace strata {

namespace {

constexpr int64_t kMostPieces = 16, kShortPiece = 64 << 10;  // bytes of a piece of all ranks together

int64_t product(const Shape& shape, size_t begin, size_t end) {
  int64_t result = 1;
  for (size_t d = begin; d < end; ++d) result *= shape[d];
  return result;
}

}  // namespace

const Split* last_split(const Tensor& tensor, int dimension, const std::string& axis) {
  for (size_t s = tensor.layout.size(); s-- > 0;)
    if (tensor.layout[s].dimension == dimension) return tensor.layout[s].axis == axis ? &tensor.layout[s] : nullptr;
  return nullptr;
}

Layout without_split(const Tensor& tensor, int dimension, const std::string& axis) {
  Layout layout = tensor.layout;
  std::erase_if(layout, [&](const Split& split) { return split.dimension == dimension && split.axis == axis; });
  return layout;
}

Layout with_split(Layout layout, int dimension, const std::string& axis, int64_t full) {
  layout.push_back({.dimension = dimension, .axis = axis, .full = full});
  return layout;
}

int64_t share_of_output(const OpView& view, int o, int dimension, const std::string& axis, int64_t full, int size) {
  const Split* split = o < view.outputs() ? last_split(view.output(o), dimension, axis) : nullptr;
  int rank = 0;
  while (split && rank + 1 < size && share_of(full, rank, size).begin < split->first) ++rank;
  return share_of(full, rank, size).count();
}

int64_t aligned_room(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t Shares::room_for(const Shape& shape, int dimension, DType dtype, Packing packing) {
  const int64_t outer = product(shape, 0, size_t(dimension)),
                piece = product(shape, size_t(dimension), shape.size()) * size_of(dtype);
  const bool few_and_long = packing == many_or_short && outer <= kMostPieces && piece >= kShortPiece;
  return outer == 1 || few_and_long ? 0 : outer * piece;
}

Shares::Shares(std::byte* data, const Shape& shape, int dimension, DType dtype, std::byte* room, Packing packing)
    : data_(data),
      room_(room),
      outer_(product(shape, 0, size_t(dimension))),
      count_(shape[size_t(dimension)]),
      inner_(product(shape, size_t(dimension) + 1, shape.size()) * size_of(dtype)),
      packed_(room_for(shape, dimension, dtype, packing) > 0) {}

Shares::Place Shares::place(int rank, int size) const {
  const Range share = share_of(count_, rank, size);
  return {data_ + share.begin * inner_, room_ + outer_ * share.begin * inner_, share.count() * inner_};
}

void Shares::add_to(Pieces& pieces, int rank, int size) const {
  const Place at = place(rank, size);
  if (packed_) return pieces.add({at.room, outer_ * at.bytes});
  for (int64_t o = 0; o < outer_; ++o) pieces.add({at.strided + o * count_ * inner_, at.bytes});
}

void Shares::pack(Communicator& group, int rank, int size) const {
  const Place at = place(rank, size);
  if (packed_) group.copy_rows(at.room, at.bytes, at.strided, count_ * inner_, at.bytes, outer_);
}

void Shares::unpack(Communicator& group, int rank, int size) const {
  const Place at = place(rank, size);
  if (packed_) group.copy_rows(at.strided, count_ * inner_, at.room, at.bytes, at.bytes, outer_);
}

void Shares::put(Communicator& group, int rank, int size, const std::byte* share) const {
  const Place at = place(rank, size);
  if (packed_ || outer_ == 1) return group.copy_bytes(packed_ ? at.room : at.strided, share, outer_ * at.bytes);
  group.copy_rows(at.strided, count_ * inner_, share, at.bytes, at.bytes, outer_);
}

}  // namespace strata
