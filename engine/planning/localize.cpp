// Shares instead of the largest share; see localize.h.
#include "engine/planning/localize.h"

#include <xxhash.h>

#include <cstdio>

#include "strata/communicator.h"
#include "strata/error.h"

namespace strata {

void localize(Program& program, const Mesh& mesh, int64_t microbatches) {
  for (Tensor& tensor : program.tensors)
    for (Split& split : tensor.layout) {
      const Axis& axis = mesh[split.axis];
      const Range share = share_of(split.full, axis.coordinate, axis.size);
      STRATA_CHECK(share.count() <= tensor.shape[size_t(split.dimension)]);
      tensor.shape[size_t(split.dimension)] = share.count();
      split.first = share.begin;
      if (tensor.part_of) {
        STRATA_CHECK(split.dimension == 0);
        tensor.part_offset = share.begin * (tensor.bytes() / share.count());
      }
    }
  const int first = mesh["data"].coordinate * int(microbatches);
  for (Op& op : program.ops)
    if (op.microbatch >= 0) op.microbatch += first;
}

std::string plan_hash(const Program& program) {
  const std::string text = print(program);
  char hash[24];
  std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(XXH3_64bits(text.data(), text.size())));
  return hash;
}

}  // namespace strata
