// The ranks of a run as a grid with named axes. Layouts (tensor.h) and exchanges name axes, never ranks.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace strata {

struct Axis {
  std::string name;
  int size = 1;
  int coordinate = 0;          // of this rank
  std::vector<int> members{};  // ranks of the world along the axis through this one, by coordinate
  bool own_programs = false;   // ranks along it have programs of their own: other tensors, data and losses
};

// Ranks that see different sequences. They are `replicate` × `shard` × `expert`: groups of `shard` ranks that share
// what is split among them, repeated `replicate` times, and for each of them the ranks among which experts are split,
// to which the tokens of each other's sequences go. `shard` and `expert` together are one axis, too: what is no
// expert's is the same on all of its ranks, so they can share it.
inline constexpr std::string_view kDataAxis = "data", kReplicateAxis = "replicate", kShardAxis = "shard",
                                  kExpertAxis = "expert", kShardExpertAxis = "shard_expert";
// Ranks that see the same sequences and share the work of each op.
inline constexpr std::string_view kTensorAxis = "tensor";
// Ranks that see the same sequences and have a part of the tokens of each. A loss is each rank's own there: what its
// tokens add.
inline constexpr std::string_view kSequenceAxis = "sequence";

class Mesh {
 public:
  struct Size {
    std::string axis;
    int ranks = 1;
    bool own_programs = false;
  };
  using Sizes = std::vector<Size>;
  Mesh() : Mesh(0, {}) {}  // one rank
  // The grid's axes, outermost first: neighbouring ranks differ in the last one. `replicate`, `shard` and `expert` make
  // up `data`, the last two of them `shard_expert`; these can be named like axes of the grid.
  Mesh(int rank, Sizes axes);
  int rank() const { return rank_; }
  int size() const { return size_; }
  int size(std::string_view axis) const { return (*this)[axis].size; }
  const Axis& operator[](std::string_view axis) const;     // an axis nobody named has one rank
  const std::vector<Axis>& axes() const { return axes_; }  // of the grid
  // What `axis` is made of: itself, or for those made of several these, the outermost first.
  std::vector<std::string_view> parts_of(std::string_view axis) const;
  // Whether two axes are made of something in common, as an axis is with itself.
  bool meet(std::string_view axis, std::string_view other) const;
  // Axes of the grid and those made of them: what ranks form groups over.
  std::vector<Axis> groups() const;
  // Whether this rank is the first of those that see the same tokens: what they all have alike, such as a loss, is
  // counted there.
  bool counts() const;
  // The axes whose ranks have programs of their own as one: of one rank where there is none.
  const Axis& programs() const { return programs_; }
  // The mesh as the first rank sees it that has this rank's program, or the one of a coordinate of `programs`: all that
  // have it plan as that one.
  Mesh planner() const { return planner(programs_.coordinate); }
  Mesh planner(int program) const;
  const Sizes& sizes() const { return sizes_; }

 private:
  int rank_ = 0, size_ = 1;
  Sizes sizes_;
  std::vector<Axis> axes_;
  std::vector<Axis> made_;  // of several of the grid
  Axis programs_;
};

}  // namespace strata
