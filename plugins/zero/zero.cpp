// ZeRO (Rajbhandari et al., arXiv 1910.02054): optimizer states, gradients and parameters split over the ranks of a
// group, by rows. Stage 1 wants gradients on the rank that updates them once a step, stage 2 once a microbatch; both
// gather updated parameters. Stage 3 keeps parameters split and gathers them before use: a resting form whose
// restoring op is a gather, so that when to gather again is the residency planner's decision.
#include <algorithm>
#include <map>

#include "strata/communicator.h"
#include "strata/plugin.h"

namespace {

using strata::Op;
using strata::Program;
using strata::RestingForm;
using strata::Role;
using strata::StepPart;
using strata::Tensor;
using strata::TensorId;

const std::string kAxis{strata::kShardAxis};  // ranks that share what is split

class Zero final : public strata::Plugin {
 public:
  void options(strata::Options& o) override {
    o.add("stage", stage_, "1: optimizer states; 2: and gradients; 3: and parameters").range(1, 3);
    o.add("bucket", bucket_, "tensors that are exchanged together").positive().unit("bytes");
    o.add("reshard", reshard_,
          "stage 3, gathered parameters: auto: released between uses, with device.memory set only as the budget asks; "
          "always: released whatever fits")
        .choices({"auto", "always"});
  }

  strata::Capabilities capabilities() const override {
    strata::Capabilities c{.provides = {"summed_gradients", "sharded_gradients", "gathered parameters", "lowers optimizer_state"},
                           .requires_ = {},
                           .conflicts = {},
                           .early = true,
                           .effect = strata::Effect::reorders()};
    if (stage_ >= 2) c.provides.push_back("lowers gradients");
    if (stage_ >= 3) c.provides.push_back("lowers parameters");
    return c;
  }

  // Stages 2 and 3: gradients of each microbatch go to their rank at once, and only shares accumulate. In a pipeline
  // they go once, when final: a stage has few parameters and many microbatches.
  void exchange(strata::ExchangeStage& stage) override {
    ranks_ = stage.mesh().size(kAxis);
    for (const strata::Gradient& gradient : stage.gradients())
      stage.want(gradient,
                 {.shared_over = ranks_ > 1 && splits(stage.program()[gradient.parameter]) ? kAxis : "",
                  .each_microbatch = stage_ >= 2 && !stage.batch().reproducible && stage.mesh().programs().size == 1,
                  .bucket = bucket_.count});
  }

  void placement(strata::ProgramStage& stage) override {
    ranks_ = stage.mesh.size(kAxis);
    if (ranks_ == 1) return;
    if (stage_ == 3)
      split_parameters(stage.program);
    else if (stage.goal == strata::Goal::train)
      gather_updated(stage.program);
  }

 private:
  // Whatever has rows to share, be they numbers of a vector. Ranks beyond the rows have none.
  static bool splits(const Tensor& parameter) { return parameter.shape[0] > 1; }

  // The layout of a rank's share of a tensor's rows.
  static strata::Layout with_rows_split(const Tensor& tensor) {
    strata::Layout layout = tensor.layout;
    layout.push_back({.dimension = 0, .axis = kAxis, .full = tensor.shape[0]});
    return layout;
  }

  // Stages 1 and 2: after the last op that writes a part, its parameter is gathered, in buckets.
  void gather_updated(Program& program) {
    std::map<size_t, std::vector<TensorId>> after;  // by op: what is gathered then
    std::vector<TensorId> bucket;
    int64_t bytes = 0;
    std::map<int32_t, size_t> written;  // by part: where last
    for (size_t i = 0; i < program.ops.size(); ++i)
      for (TensorId id : program.ops[i].outputs)
        if (program[id].part_of) written[id.value] = i;
    std::vector<std::pair<size_t, TensorId>> order;
    for (const auto& [part, at] : written) order.push_back({at, program.whole({part})});
    std::sort(order.begin(), order.end());
    for (size_t n = 0; n < order.size(); ++n) {
      bucket.push_back(order[n].second);
      bytes += program[order[n].second].bytes();
      if (bytes < bucket_.count && n + 1 < order.size()) continue;
      after[order[n].first] = std::move(bucket);
      bucket.clear();
      bytes = 0;
    }
    std::vector<Op> ops;
    for (size_t i = 0; i < program.ops.size(); ++i) {
      ops.push_back(std::move(program.ops[i]));
      const auto found = after.find(i);
      if (found == after.end()) continue;
      Op gather = strata::make_op("gather_rows", found->second, found->second, {{"axis", kAxis}});
      gather.step_part = StepPart::update;
      ops.push_back(std::move(gather));
    }
    program.ops = std::move(ops);
  }

  // Stage 3: parameters become their parts, and what reads them reads gathered ones.
  void split_parameters(Program& program) {
    std::map<int32_t, TensorId> gathered;  // by parameter
    for (TensorId id : program.with_role(Role::parameter)) {
      if (!splits(program[id])) continue;
      Tensor full = program[id];
      full.name = full.name + ".gathered";
      full.persistent = false;
      full.lasting = {};
      full.nearest = full.farthest = strata::Tier::device;
      gathered[id.value] = program.add(std::move(full));
      Tensor& parameter = program[id];
      parameter.layout = with_rows_split(parameter);
      strata::Shape shape = parameter.shape;
      shape[0] = strata::share_of(shape[0], 0, ranks_).count();
      parameter.shape = std::move(shape);
    }
    for (auto& [tensor, forms] : program.forms) {
      std::vector<RestingForm> redirected = forms;
      for (RestingForm& form : redirected)
        for (auto* list : {&form.rest, &form.restore})
          for (Op& op : *list) redirect(program, gathered, op);
      forms = std::move(redirected);
    }
    // Gathered together: parameters first read in one block, up to a bucket.
    struct Group {
      std::vector<TensorId> parameters;
      int64_t bytes = 0;
    };
    std::map<size_t, Group> before;  // by op
    std::map<int32_t, bool> seen;
    int block = -2;
    size_t at = 0;
    for (size_t i = 0; i < program.ops.size(); ++i)
      for (TensorId id : program.ops[i].inputs) {
        if (!id || !gathered.contains(id.value) || seen[id.value]) continue;
        seen[id.value] = true;
        if (program.ops[i].block != block || program.ops[i].block < 0 || before[at].bytes >= bucket_.count)
          block = program.ops[i].block, at = i;
        before[at].parameters.push_back(id);
        before[at].bytes += program[gathered[id.value]].bytes();
      }
    std::vector<Op> ops;
    for (size_t i = 0; i < program.ops.size(); ++i) {
      if (const auto found = before.find(i); found != before.end() && !found->second.parameters.empty()) {
        Op gather = strata::make_op("all_gather", found->second.parameters, {}, {{"axis", kAxis}});
        for (TensorId id : gather.inputs) gather.outputs.push_back(gathered[id.value]);
        gather.step_part = program.ops[i].step_part;
        gather.block = program.ops[i].block;
        gather.purpose = strata::Purpose::restore;
        for (TensorId id : gather.outputs)
          program.forms[id.value].push_back(
              {.name = "gather",
               .rest = {},
               .restore = {gather},
               .when = reshard_ == "always" ? RestingForm::When::between_blocks : RestingForm::When::unless_budget});
        ops.push_back(std::move(gather));
      }
      Op op = program.ops[i];
      redirect(program, gathered, op);
      ops.push_back(std::move(op));
    }
    program.ops = std::move(ops);
  }

  // Reads of a parameter become reads of what is gathered; uses of its part become uses of the parameter.
  static void redirect(const Program& program, const std::map<int32_t, TensorId>& gathered, Op& op) {
    for (auto* list : {&op.inputs, &op.outputs})
      for (TensorId& id : *list) {
        if (!id) continue;
        if (program[id].part_of && gathered.contains(program[id].part_of.value))
          id = program[id].part_of;
        else if (const auto found = gathered.find(id.value); found != gathered.end())
          id = found->second;
      }
  }

  int64_t stage_ = 2;
  strata::Bytes bucket_{25 << 20};
  std::string reshard_ = "auto";
  int ranks_ = 1;
};

}  // namespace

STRATA_PLUGIN(Zero, "zero", "1.0.0", "splits optimizer states, gradients and parameters over ranks")
