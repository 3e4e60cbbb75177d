// Shares instead of the largest share; see localize.h.
#include "engine/planning/localize.h"

#include <algorithm>

#include "strata/communicator.h"
#include "strata/error.h"
#include "strata/layout.h"

namespace strata {

void localize(Program& program, const Mesh& mesh, int64_t microbatches) {
  std::vector<int64_t> planned(program.tensors.size());  // bytes of divided tensors
  for (size_t t = 0; t < program.tensors.size(); ++t) {
    Tensor& tensor = program.tensors[t];
    if (tensor.layout.empty()) continue;
    planned[t] = tensor.bytes();
    Shape shape = tensor.full_shape();
    Layout layout = tensor.layout;
    for (Split& split : layout) {  // what a split divides, those before it have left
      int64_t& size = shape[size_t(split.dimension)];
      const Axis& axis = mesh[split.axis];
      split.full = size;
      const Range share = share_of(split, axis.coordinate, axis.size);
      split.first = share.begin;
      size = share.count();
    }
    for (size_t d = 0; d < shape.size(); ++d) STRATA_CHECK(shape[d] <= tensor.shape[d]);
    tensor.shape = std::move(shape);
    tensor.layout = std::move(layout);
  }
  for (Tensor& part : program.tensors) {
    if (!part.part_of) continue;
    // A piece along a dimension before those that are divided: rows are as long as this rank's share.
    if (const int64_t bytes = planned[size_t(part.part_of.value)]; bytes > 0 && !part.persistent)
      part.part_offset = int64_t(__int128(part.part_offset) * program[part.part_of].bytes() / bytes);
    // Splits beyond those of the whole say where in it the part begins; a part is contiguous, so they divide rows.
    const Layout& whole = program[part.part_of].layout;
    int64_t row = 0;
    for (size_t s = whole.size(); s < part.layout.size(); ++s) {
      STRATA_CHECK(part.layout[s].dimension == 0);
      row += part.layout[s].first;
    }
    if (part.layout.size() > whole.size())
      part.part_offset = row * (elements(part.shape) / std::max<int64_t>(1, part.shape[0])) * size_of(part.dtype);
  }
  const int first = mesh[kDataAxis].coordinate * int(microbatches);
  for (Op& op : program.ops) {
    if (op.microbatch >= 0) op.microbatch += first;
    if (op.attributes.has("coordinate"))
      op.attributes.set("coordinate", int64_t(mesh[op.attributes.string("axis")].coordinate));
  }
  verify(program, "localizing", &mesh);
}

}  // namespace strata
