// The stages of a pipeline as an axis of the mesh, the outermost. Along it alone ranks have different programs: each
// has tensors, data and losses of its own stage.
#pragma once
#include <string_view>

#include "strata/mesh.h"

namespace strata {

inline constexpr std::string_view kPipelineAxis = "pipeline";

// The mesh as the first rank of a stage sees it.
inline Mesh of_stage(const Mesh& mesh, int stage) {
  Mesh::Sizes sizes;
  for (const Axis& axis : mesh.axes()) sizes.push_back({axis.name, axis.size});
  return Mesh(stage * (mesh.size() / mesh.size(kPipelineAxis)), std::move(sizes));
}

// The mesh as the first rank of this rank's stage sees it: all of a stage plan as that one.
inline Mesh planner_of(const Mesh& mesh) { return of_stage(mesh, mesh[kPipelineAxis].coordinate); }

}  // namespace strata
