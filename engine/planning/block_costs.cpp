// What the blocks of a model take and keep (strata/pipeline_schedule.h).
#include <algorithm>
#include <numeric>
#include <utility>

#include "engine/planning/passes.h"
#include "engine/program/autodiff.h"
#include "strata/op_kind.h"
#include "strata/pipeline_schedule.h"

namespace strata::pipeline {
namespace {

constexpr double kFlopsPerByte = 16;

double time_of(const OpView& view) {
  const Cost cost = cost_of(view);
  return std::max(cost.flops, kFlopsPerByte * cost.bytes);
}

class BlockCosts {
 public:
  explicit BlockCosts(const Program& forward) : program_(forward) {
    const std::vector<TensorId> parameters = program_.with_role(Role::parameter);
    std::vector<Root> roots;
    for (TensorId loss : program_.losses) roots.push_back({loss, {}});
    const Differentiated made = differentiate(program_, roots, parameters);
    std::vector<int> blocks(size_t(std::max(1, blocks_of(program_))));
    std::iota(blocks.begin(), blocks.end(), 0);
    costs_.assign(blocks.size(), {0, 0, 0, 0, 0, 0});
    const PassTable passes(program_, made.activations, blocks);
    maker_.assign(program_.tensors.size(), -1);
    part_.assign(program_.ops.size(), Pass::Part::forward);
    for (int b = 0; b < int(blocks.size()); ++b)
      for (const Pass::Part part : {Pass::Part::forward, Pass::Part::input_gradient, Pass::Part::weight_gradient})
        for (int32_t i : passes.ops({part, b, 0})) part_[size_t(i)] = part;
  }

  std::vector<ChunkCost> find() {
    for (size_t i = 0; i < program_.ops.size(); ++i)
      for (TensorId id : program_.ops[i].outputs) maker_[size_t(program_.whole(id).value)] = int32_t(i);
    std::vector<char> has(program_.tensors.size(), false);
    std::vector<int> kept(program_.tensors.size(), -1), kept_for_weights(kept);  // by tensor: the last block counted
    for (size_t i = 0; i < program_.ops.size(); ++i) {
      const Op& op = program_.ops[i];
      ChunkCost& cost = costs_[size_t(op.chunk)];
      (part_[i] == Pass::Part::forward          ? cost.forward
       : part_[i] == Pass::Part::input_gradient ? cost.input_gradient
                                                : cost.weight_gradient) += time_of(OpView(program_, op));
      for (TensorId id : op.inputs) {
        if (!id) continue;
        const TensorId whole = program_.whole(id);
        const Tensor& tensor = program_[whole];
        if (tensor.role == Role::parameter && !std::exchange(has[size_t(whole.value)], true))
          cost.parameters += tensor.bytes();
        const int32_t maker = maker_[size_t(whole.value)];
        if (tensor.persistent || maker < 0 || part_[i] == Pass::Part::forward) continue;
        if (part_[size_t(maker)] == Pass::Part::forward &&
            std::exchange(kept[size_t(whole.value)], op.chunk) != op.chunk)
          cost.activation += tensor.bytes();
        if (part_[i] == Pass::Part::weight_gradient && part_[size_t(maker)] != Pass::Part::weight_gradient &&
            std::exchange(kept_for_weights[size_t(whole.value)], op.chunk) != op.chunk)
          cost.weight_activation += tensor.bytes();
      }
    }
    return costs_;
  }

 private:
  Program program_;
  std::vector<ChunkCost> costs_;
  std::vector<Pass::Part> part_;  // by op
  std::vector<int32_t> maker_;    // by tensor, parts as their whole: the op
};

}  // namespace

ChunkCost& ChunkCost::operator+=(const ChunkCost& other) {
  forward += other.forward, input_gradient += other.input_gradient, weight_gradient += other.weight_gradient;
  activation += other.activation, weight_activation += other.weight_activation, parameters += other.parameters;
  return *this;
}

std::vector<ChunkCost> costs_of_blocks(const Program& forward) { return BlockCosts(forward).find(); }

}  // namespace strata::pipeline
