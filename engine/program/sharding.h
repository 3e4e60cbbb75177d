// Sharding rules (Sharding, strata/op_kind.h) read for one op: which factor each dimension of its tensors is, how its
// outputs are split, and over which axes they are partial sums. The pass that splits a program, Builder, the verifier
// and what finds out over which axes gradients are partial all ask here.
#pragma once
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "strata/op_kind.h"

namespace strata {

// A dimension that is no factor, and one that is several merged.
inline constexpr int kNoFactor = -1, kMerged = -2;

// By input and output, the factor of each dimension: a letter, or the number of a dimension of "...". Inputs that are
// left out have none.
struct Factors {
  std::vector<std::vector<int>> inputs, outputs;
  // The dimension of a tensor that a factor is, or is merged into; or -1.
  static int dimension_of(const std::vector<int>& tensor, int factor);
};

inline bool has_rule(const OpKind& kind) { return !kind.sharding.dimensions.empty(); }
// Throws Error (failed) where the rule does not fit the op's tensors: a slip of who wrote the kind.
Factors factors_of(const OpView& view);
bool needs_whole(const Sharding& sharding, int factor);
bool needs_data_axis(const Sharding& sharding, int factor);  // Sharding::by_data
bool is_replaced(const Sharding& sharding, int factor);

const Split* split_over(const Tensor& tensor, const std::string& axis);  // null: the axis does not split it
inline bool is_seen(const Split& split) { return !split.unseen; }

// How the outputs are split, as far as kinds see it: as the kind's layout rule says, or else its sharding rule; without
// either they are whole.
std::vector<Layout> layouts_of(const OpView& view);

// An attribute of ops that take partial sums although their kind is not linear: what each rank adds is meant to be
// rounded before it is summed.
inline constexpr std::string_view kTakesPartial = "takes_partial";

// Axes over which a tensor is a partial sum, in ascending order.
using Partial = std::set<std::string>;

// Of the outputs, from that of the inputs (without addends). Kinds without a rule make no partial sums.
std::vector<Partial> partial_of(const OpView& view, const std::vector<Partial>& inputs, const Mesh* mesh);

// What is wrong with how the inputs of an op are split, or with partial sums among them; empty where nothing is. Only
// of kinds that have a sharding rule.
std::string split_problem(const OpView& view, const std::vector<Partial>& inputs);

// Over which axes each tensor of a program is a partial sum when its last op has run. Throws Error (failed), with
// `after` and the op, where an op gets partial sums or splits that its rule does not take.
std::vector<Partial> partial_sums(const Program& program, std::string_view after, const Mesh* mesh);

}  // namespace strata
