// Axes from sizes (strata/mesh.h).
#include "strata/mesh.h"

#include <algorithm>

#include "strata/error.h"

namespace strata {
namespace {

// Axes made of several of the grid, and which, the outermost first.
struct MadeAxis {
  std::string_view name;
  std::vector<std::string_view> parts;
};
const std::vector<MadeAxis>& made_axes() {
  static const std::vector<MadeAxis> list{{kDataAxis, {kReplicateAxis, kShardAxis, kExpertAxis}},
                                          {kShardExpertAxis, {kShardAxis, kExpertAxis}}};
  return list;
}

bool is_among(const std::vector<std::string_view>& axes, std::string_view axis) {
  return std::find(axes.begin(), axes.end(), axis) != axes.end();
}

struct Grid {
  std::vector<int> size, stride;  // by axis; ranks between neighbours along it
};

Grid grid_of(const Mesh::Sizes& sizes) {
  Grid grid;
  int stride = 1;
  for (size_t a = sizes.size(); a-- > 0;) {
    grid.size.insert(grid.size.begin(), sizes[a].ranks);
    grid.stride.insert(grid.stride.begin(), stride);
    stride *= sizes[a].ranks;
  }
  return grid;
}

// The axis made of those chosen: ranks that agree with `rank` on all others, the first axis chosen outermost.
Axis combined(std::string name, int rank, const Grid& grid, const std::vector<size_t>& chosen) {
  Axis axis{std::move(name), 1, 0, {}};
  int origin = rank;
  for (size_t a : chosen) {
    const int coordinate = rank / grid.stride[a] % grid.size[a];
    origin -= coordinate * grid.stride[a];
    axis.coordinate = axis.coordinate * grid.size[a] + coordinate;
    axis.size *= grid.size[a];
  }
  for (int i = 0; i < axis.size; ++i) {
    int member = origin, rest = i;
    for (size_t c = chosen.size(); c-- > 0; rest /= grid.size[chosen[c]])
      member += rest % grid.size[chosen[c]] * grid.stride[chosen[c]];
    axis.members.push_back(member);
  }
  return axis;
}

}  // namespace

Mesh::Mesh(int rank, Sizes axes) : rank_(rank), sizes_(std::move(axes)) {
  const Grid grid = grid_of(sizes_);
  std::vector<size_t> programs;
  for (size_t a = 0; a < sizes_.size(); ++a) {
    const auto& [name, ranks, own_programs] = sizes_[a];
    size_ *= ranks;
    axes_.push_back(combined(name, rank, grid, {a}));
    axes_.back().own_programs = own_programs;
    if (own_programs) programs.push_back(a);
  }
  for (const MadeAxis& one : made_axes()) {
    std::vector<size_t> chosen;
    for (size_t a = 0; a < sizes_.size(); ++a)
      if (is_among(one.parts, sizes_[a].axis)) chosen.push_back(a);
    made_.push_back(combined(std::string(one.name), rank, grid, chosen));
  }
  programs_ = combined("", rank, grid, programs);
  programs_.own_programs = true;
}

Mesh Mesh::planner(int program) const {
  STRATA_CHECK(program >= 0 && program < programs_.size);
  return Mesh(Mesh(0, sizes_).programs_.members[size_t(program)], sizes_);
}

const Axis& Mesh::operator[](std::string_view axis) const {
  for (const auto* list : {&made_, &axes_})
    for (const Axis& one : *list)
      if (one.name == axis) return one;
  static const Axis alone;
  return alone;
}

std::vector<std::string_view> Mesh::parts_of(std::string_view axis) const {
  for (const MadeAxis& one : made_axes())
    if (one.name == axis) return one.parts;
  return {axis};
}

bool Mesh::meet(std::string_view axis, std::string_view other) const {
  const std::vector<std::string_view> parts = parts_of(axis), others = parts_of(other);
  return std::any_of(parts.begin(), parts.end(), [&](std::string_view part) { return is_among(others, part); });
}

bool Mesh::counts() const {
  return std::all_of(axes_.begin(), axes_.end(), [](const Axis& axis) {
    // Of programs of their own those without a loss add nothing.
    return axis.coordinate == 0 || axis.name == kReplicateAxis || axis.name == kShardAxis ||
           axis.name == kExpertAxis || axis.name == kSequenceAxis || axis.own_programs;
  });
}

std::vector<Axis> Mesh::groups() const {
  std::vector<Axis> all = axes_;
  for (const Axis& one : made_)  // without ranks along `expert` nobody names what it makes with `shard`
    if (one.name != kShardExpertAxis || size(kExpertAxis) > 1) all.push_back(one);
  return all;
}

}  // namespace strata
