// The sharding rule of losses of a microbatch's tokens that are no sums over them (balance of load, router.cpp and
// noisy_gating.cpp): where ranks divide the tokens each makes the whole loss, of what all ranks have. The order of
// tokens does not matter to such a loss.
#pragma once
#include "engine/ops/rank_order.h"
#include "strata/op_kind.h"

namespace strata {

// `dimensions` calls the tokens of a sequence t, the second dimension of every input: "bte, btk -> _".
inline Sharding loss_of_tokens(const std::string& dimensions) {
  const auto of_all = [](Builder& build, const OpView& v, const std::string& axis, int size) {
    std::vector<TensorId> all;
    for (TensorId own : v.op().inputs) all.push_back(gathered_by_rank(build, own, axis, size, 1));
    return std::vector<TensorId>{build.emit(v.op().kind->name, all, v.attributes())};
  };
  return {.dimensions = dimensions, .whole = "bek", .by_data = "t", .replaced = "t", .replace = of_all};
}

}  // namespace strata
