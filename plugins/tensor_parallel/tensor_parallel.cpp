// Tensor parallelism (Shoeybi et al., arXiv 1909.08053): ranks of the axis `tensor` share the work of each op. All that
// is said here is which named dimensions they divide among them; shapes, exchanges and the backward pass follow from
// the sharding rules of the ops (Sharding, strata/op_kind.h).
#include <algorithm>
#include <map>
#include <set>

#include "strata/pattern.h"
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
    o.add("parameters", patterns_,
          "parameters that are divided otherwise: \"PATTERN: DIMENSION\", where * in the pattern stands for any text, "
          "and "
          "DIMENSION is one that the parameter has, or none");
    o.add("sequence", sequence_,
          "between the divided products, divide the tokens of a sequence, too: norms, dropout and the residual stream "
          "(arXiv 2205.05198)");
    o.add("pieces", pieces_,
          "into how many pieces products and the exchanges beside them are cut along tokens, so that one piece is "
          "exchanged while the next is computed; 0: 1, 2 or 4, as is predicted to be fastest, so another run may round "
          "otherwise")
        .range(0, 64);
    o.add("bucket", bucket_, "gradients that are exchanged together, of parameters that are not divided")
        .positive()
        .unit("bytes");
  }

  strata::Capabilities capabilities() const override {
    return {.provides = {"splits over tensor", "lowers parameters", "lowers gradients", "lowers optimizer_state",
                         "lowers activations"},
            .conflicts = {{"reproducible sums over tensor",
                           "products that are divided among ranks are summed in another order; leave one of the two "
                           "out"}},
            .effect = strata::Effect::reorders()};
  }

  void forward(strata::ProgramStage& stage) override {
    if (stage.mesh.size(kAxis) == 1) return;
    const std::vector<std::string> names = divided(stage.program);
    for (const std::string& name : names) stage.splits.push_back({.dimension = name, .axis = kAxis});
    for (const std::string& name : divide_otherwise(stage.program, names))
      stage.splits.push_back({.dimension = name, .axis = kAxis});
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
    if (stage.mesh().size(kAxis) == 1)
      stage.note("it does nothing here: axis \"" + kAxis + "\" of the mesh has one rank.");
    for (const strata::Gradient& gradient : stage.gradients())
      if (std::find(gradient.partial.begin(), gradient.partial.end(), kAxis) != gradient.partial.end())
        stage.want(gradient, {.bucket = bucket_.count}, kAxis);
  }

  // The engine cuts what is marked so (engine/planning/exchange_pieces.h). Recomputation repeats exchanges: those, too.
  void placement(strata::ProgramStage& stage) override {
    if (pieces_ == 1) return;
    const auto mark = [&](strata::Op& op) {
      if (op.kind->exchange && op.attributes.has("axis") && op.attributes.string("axis") == kAxis)
        op.attributes.set("pieces", int64_t{pieces_});
    };
    for (strata::Op& op : stage.program.ops) mark(op);
    for (auto& [tensor, forms] : stage.program.forms) {
      std::vector<strata::RestingForm> marked(forms.begin(), forms.end());
      for (strata::RestingForm& form : marked)
        for (strata::Op& op : form.restore) mark(op);
      forms = std::move(marked);
    }
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

  // Of a parameter that a pattern names, the dimension that is divided gets a name of its own, and those that would
  // have been divided without the pattern one that nothing divides. Returns the former.
  std::set<std::string> divide_otherwise(strata::Program& program, const std::vector<std::string>& usual) const {
    std::map<int32_t, size_t> chosen;  // by parameter: which pattern
    for (size_t p = 0; p < patterns_.size(); ++p) {
      const Pattern pattern(patterns_[p]);
      bool found = false;
      for (strata::TensorId id : program.with_role(strata::Role::parameter)) {
        const std::string name = program[id].name;
        if (!strata::matches(pattern.name, name)) continue;
        found = true;
        const auto [before, is_first] = chosen.emplace(id.value, p);
        if (is_first) continue;
        if (Pattern(patterns_[before->second]).dimension != pattern.dimension)
          throw Error("parameters: \"" + patterns_[before->second] + "\" and \"" + patterns_[p] +
                      "\" contradict each other for " + name + "; narrow one of them so that it does not match.");
      }
      if (!found)
        throw Error("parameters: \"" + patterns_[p] + "\" matches no parameter of the model" +
                    strata::names_like(program));
    }
    std::set<std::string> names;
    for (const auto& [id, p] : chosen) rename(program[{id}], Pattern(patterns_[p]).dimension, usual, names);
    return names;
  }

  struct Pattern {
    std::string name, dimension;
    explicit Pattern(const std::string& text) {
      const size_t colon = text.rfind(':'), word = colon == text.npos ? colon : text.find_first_not_of(' ', colon + 1);
      if (colon == 0 || word == text.npos)
        throw Error("parameters: \"" + text +
                    "\" is not of the form \"PATTERN: DIMENSION\", such as \"block.*.up.*: ffn\" or \"head.weight: "
                    "none\".");
      name = text.substr(0, colon), dimension = text.substr(word);
    }
  };

  static void rename(strata::Tensor& tensor, const std::string& wanted, const std::vector<std::string>& usual,
                     std::set<std::string>& divided) {
    strata::Dimensions dimensions = tensor.dimensions;
    bool found = wanted == "none";
    std::string all;
    for (strata::Dimension& dimension : dimensions) {
      all += (all.empty() ? "" : ", ") + dimension.name;
      if (dimension.name == wanted && !found) {
        dimension.name += " (by pattern)";
        divided.insert(dimension.name);
        found = true;
      } else if (std::find(usual.begin(), usual.end(), dimension.name) != usual.end()) {
        dimension.name += " (whole)";
      }
    }
    if (!found)
      throw Error("parameters: " + std::string(tensor.name) + " has no dimension named \"" + wanted + "\"; it has " +
                  (all.empty() ? "none with a name" : all) + ". Name one of them, or none.");
    tensor.dimensions = std::move(dimensions);
  }

  std::vector<std::string> dimensions_, patterns_;
  bool sequence_ = false;
  int pieces_ = 1;
  strata::Bytes bucket_{25 << 20};
};

}  // namespace

STRATA_PLUGIN(TensorParallel, "tensor_parallel", "1.0.0",
              "divides heads, feed-forward layers and vocabulary among the ranks of the mesh axis tensor")
