// Shares instead of the largest share; see localize.h.
#include "engine/planning/localize.h"

#include <algorithm>

#include "strata/communicator.h"
#include "strata/error.h"

namespace strata {

void localize(Program& program, const Mesh& mesh, int64_t microbatches) {
  for (Tensor& tensor : program.tensors) {
    const Shape planned = tensor.shape;
    tensor.shape = tensor.full_shape();
    for (Split& split : tensor.layout) {  // what a split divides, those before it have left
      int64_t& size = tensor.shape[size_t(split.dimension)];
      const Axis& axis = mesh[split.axis];
      const Range share = share_of(size, axis.coordinate, axis.size);
      split.full = size;
      split.first = share.begin;
      size = share.count();
    }
    for (size_t d = 0; d < planned.size(); ++d) STRATA_CHECK(tensor.shape[d] <= planned[d]);
  }
  for (Tensor& part : program.tensors) {
    if (!part.part_of) continue;
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
  for (Op& op : program.ops)
    if (op.microbatch >= 0) op.microbatch += first;
  verify(program, "localizing", &mesh);
}

}  // namespace strata
