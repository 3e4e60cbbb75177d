// Axes from sizes (strata/mesh.h).
#include "strata/mesh.h"

namespace strata {

Mesh::Mesh(int rank, int data, int replicate) : rank_(rank), size_(data) {
  const int shard = data / replicate;
  Axis all{"data", data, rank, {}}, sharded{"shard", shard, rank % shard, {}},
      copies{"replicate", replicate, rank / shard, {}};
  for (int r = 0; r < data; ++r) all.members.push_back(r);
  for (int r = 0; r < shard; ++r) sharded.members.push_back(copies.coordinate * shard + r);
  for (int r = 0; r < replicate; ++r) copies.members.push_back(r * shard + sharded.coordinate);
  axes_ = {all, sharded, copies};
}

const Axis& Mesh::operator[](std::string_view axis) const {
  for (const Axis& one : axes_)
    if (one.name == axis) return one;
  static const Axis alone;
  return alone;
}

}  // namespace strata
