// Tensor parallelism (Shoeybi et al., arXiv 1909.08053): ranks of the axis `tensor` share the work of each op. All that
// is said here is which named dimensions they divide among them; shapes, exchanges and the backward pass follow from
// the sharding rules of the ops (Sharding, strata/op_kind.h).
#include <algorithm>
#include <set>

#include "strata/plugin.h"

namespace {

using strata::Error;

const std::string kAxis{strata::kTensorAxis};

class TensorParallel final : public strata::Plugin {
 public:
  void options(strata::Options& o) override {
    o.add(
        "dimensions", dimensions_,
        "names of the parameters' dimensions that are divided among the ranks; none given: heads, ffn and vocabulary, "
        "as far as the model has them");
    o.add("sequence", sequence_,
          "between the divided products, divide the tokens of a sequence, too: norms, dropout and the residual stream "
          "(arXiv 2205.05198)");
    o.add("bucket", bucket_, "gradients that are exchanged together, of parameters that are not divided")
        .positive()
        .unit("bytes");
  }

  strata::Capabilities capabilities() const override {
    return {.provides = {"splits over tensor", "lowers parameters", "lowers gradients", "lowers optimizer_state",
                         "lowers activations"}};
  }

  void forward(strata::ProgramStage& stage) override {
    if (stage.mesh.size(kAxis) == 1) return;
    if (stage.batch.reproducible)
      throw Error(
          "run.reproducible promises sums that do not depend on the number of ranks, but products that are divided "
          "among ranks are summed in another order; leave one of the two out.");
    for (const std::string& name : divided(stage.program)) stage.splits.push_back({.dimension = name, .axis = kAxis});
    if (!sequence_) return;
    if (!names_time(stage.program))
      throw Error("sequence = true divides the dimension \"time\" of activations, but the model names it of none.");
    stage.splits.push_back({.dimension = "time", .axis = kAxis, .role = strata::Role::activation});
  }

  // Each rank keeps its tokens for the backward pass, and gathers the others' again (section 4.2.2 of the paper).
  void backward(strata::ProgramStage& stage) override {
    if (!sequence_) return;
    for (const strata::Op& op : stage.program.ops)
      if (op.kind->name == "all_gather" && op.step_part == strata::StepPart::forward && op.block >= 0 &&
          op.attributes.string("axis") == kAxis)
        stage.program.forms[op.outputs[0].value].push_back({.name = "gathered again", .restore = {op}});
  }

  // Of parameters that are whole while the work on them was divided, ranks have parts of a sum.
  void exchange(strata::ExchangeStage& stage) override {
    for (const strata::Gradient& gradient : stage.gradients())
      if (std::find(gradient.partial.begin(), gradient.partial.end(), kAxis) != gradient.partial.end())
        stage.want(gradient, {.bucket = bucket_.count}, kAxis);
  }

 private:
  static bool names_time(const strata::Program& program) {
    return std::any_of(program.tensors.begin(), program.tensors.end(), [](const strata::Tensor& tensor) {
      return tensor.role == strata::Role::activation &&
             std::any_of(tensor.dimensions.begin(), tensor.dimensions.end(),
                         [](const strata::Dimension& dimension) { return dimension.name == "time"; });
    });
  }

  std::vector<std::string> divided(const strata::Program& program) const {
    if (!dimensions_.empty()) {
      std::vector<std::string> names = dimensions_;
      std::sort(names.begin(), names.end());
      if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end())
        throw Error("dimensions names \"" + *twice + "\" twice.");
      return dimensions_;
    }
    std::set<std::string> known;
    for (strata::TensorId id : program.with_role(strata::Role::parameter))
      for (const strata::Dimension& dimension : program[id].dimensions) known.insert(dimension.name);
    std::vector<std::string> names;
    for (const char* usual : {"heads", "ffn", "vocabulary"})
      if (known.contains(usual)) names.emplace_back(usual);
    if (!names.empty()) return names;
    std::string all;
    for (const std::string& name : known) all += (all.empty() ? "" : ", ") + name;
    throw Error("the model has no dimension named heads, ffn or vocabulary to divide among the ranks of axis \"" +
                kAxis + "\"; " + (all.empty() ? "it names none." : "it names " + all + ": say which in dimensions."));
  }

  std::vector<std::string> dimensions_;
  bool sequence_ = false;
  strata::Bytes bucket_{25 << 20};
};

}  // namespace

STRATA_PLUGIN(TensorParallel, "tensor_parallel", "1.0.0",
              "divides heads, feed-forward layers and vocabulary among the ranks of the mesh axis tensor")
