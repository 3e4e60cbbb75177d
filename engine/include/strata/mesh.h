// The ranks of a run as a grid with named axes. Layouts (tensor.h) and exchanges name axes, never ranks.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace strata {

// `data`: ranks that see different sequences. It is made of `replicate` × `shard`: groups of `shard` ranks that share
// what is split among them, repeated `replicate` times.
struct Axis {
  std::string name;
  int size = 1;
  int coordinate = 0;        // of this rank
  std::vector<int> members;  // ranks of the world along the axis through this one, by coordinate
};

class Mesh {
 public:
  Mesh() = default;  // one rank
  // `data` ranks in all, `replicate` groups of them.
  Mesh(int rank, int data, int replicate);
  int rank() const { return rank_; }
  int size() const { return size_; }
  int size(std::string_view axis) const { return (*this)[axis].size; }
  const Axis& operator[](std::string_view axis) const;  // an axis nobody named has one rank
  const std::vector<Axis>& axes() const { return axes_; }
  // The mesh as its rank 0 sees it.
  Mesh first() const { return Mesh(0, size("data"), size("replicate")); }

 private:
  int rank_ = 0, size_ = 1;
  std::vector<Axis> axes_;
};

}  // namespace strata
