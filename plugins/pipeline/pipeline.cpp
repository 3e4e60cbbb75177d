// Pipelines: each stage keeps its blocks of the model's program, what comes from the stage before is received at the
// start, what the next one needs is sent at the end. Gradients go back by the gradient rules of send and receive.
#include <algorithm>
#include <numeric>

#include "plugins/pipeline/actions.h"
#include "plugins/pipeline/schedules/schedules.h"
#include "strata/plugin.h"

namespace {

using strata::Error;
using strata::Op;
using strata::Program;
using strata::TensorId;

const std::string kAxis = "pipeline";

std::string sizes_text(const strata::Shape& shape) {
  std::string text;
  for (int64_t size : shape) text += (text.empty() ? "" : "x") + std::to_string(size);
  return text;
}

// By op: the stage that runs it. What belongs to no block goes with the op before it: the embedding with the first
// block, the loss with the last.
std::vector<int> stages_of(const Program& program, int stages) {
  int blocks = 0, at = 0;
  for (const Op& op : program.ops) blocks = std::max(blocks, op.block + 1);
  if (stages > blocks)
    throw Error("mesh.pipeline asks for " + std::to_string(stages) + " stages, but the model has " +
                std::to_string(blocks) + " blocks to divide among them; lower it.");
  std::vector<int> of;
  for (const Op& op : program.ops) {
    if (op.block >= 0) at = std::max(at, int(int64_t(op.block) * stages / blocks));
    of.push_back(at);
  }
  return of;
}

// By stage but the last: the one tensor that the next stage needs of it.
std::vector<TensorId> borders(const Program& program, const std::vector<int>& stage_of, int stages) {
  std::vector<int> maker(program.tensors.size(), -1), user(program.tensors.size(), -1);
  std::vector<TensorId> borders(size_t(stages - 1));
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const int stage = stage_of[i];
    for (TensorId id : program.ops[i].inputs) {
      if (!id) continue;
      const std::string name = program[id].name;
      if (program[id].role == strata::Role::parameter) {
        int& first = user[size_t(id.value)];
        if (first >= 0 && first != stage)
          throw Error("\"" + name + "\" is used by the stages " + std::to_string(first) + " and " +
                      std::to_string(stage) +
                      "; parameters that stages share are not built yet. Set tied = false, or mesh.pipeline = 1.");
        first = stage;
      }
      const int from = maker[size_t(id.value)];
      if (from < 0 || from == stage) continue;
      TensorId& border = borders[size_t(from)];
      if (from + 1 != stage || (border && border != id))
        throw Error("\"" + name + "\" is made on stage " + std::to_string(from) + " and read on stage " +
                    std::to_string(stage) +
                    "; the model can be cut only where one tensor alone crosses to the next stage.");
      border = id;
    }
    for (TensorId id : program.ops[i].outputs) maker[size_t(id.value)] = stage;
  }
  return borders;
}

class Pipeline final : public strata::Plugin {
 public:
  Pipeline() {
    static const bool once = (strata::pipeline::register_schedules(), true);
    (void)once;
  }

  void options(strata::Options& o) override {
    o.add("schedule", schedule_,
          "in which order a stage runs its passes: gpipe, 1f1b, zero_bubble_h1 or zero_bubble_h2")
        .choices({"gpipe", "1f1b", "zero_bubble_h1", "zero_bubble_h2"});
  }

  strata::Capabilities capabilities() const override {
    // A loss scale is a state that all stages would have.
    return {.provides = {"splits over " + kAxis}, .conflicts = {"unscaled_gradients"}};
  }

  void forward(strata::ProgramStage& stage) override {
    stages_ = stage.mesh.size(kAxis);
    stage_ = stage.mesh[kAxis].coordinate;
    const bool trains = stage.goal == strata::Goal::train;
    if (stages_ == 1 && !trains) return;
    if (stages_ == 1)
      throw Error("pipeline divides the model among the stages of axis \"" + kAxis + "\", which has one; set mesh." +
                  kAxis + " to their number, or leave the plugin out.");
    if (const int parts = stage.mesh.size(strata::kSequenceAxis); parts > 1)
      throw Error("pipelines of sequences that are divided among ranks are not built yet, and axis \"sequence\" has " +
                  std::to_string(parts) + " ranks; leave one of the two out.");
    Program& program = stage.program;
    const std::vector<int> stage_of = stages_of(program, stages_);
    const std::vector<TensorId> between = borders(program, stage_of, stages_);
    size_t i = 0;
    std::erase_if(program.ops, [&](const Op&) { return stage_of[i++] != stage_; });
    strata::Builder build(program);
    if (stage_ > 0) {
      const TensorId x = between[size_t(stage_ - 1)];
      std::vector<TensorId> start;
      if (trains) start.push_back(build.data("pipeline.start", {1}, strata::DType::u8));  // says nothing
      build.emit_all("receive", start,
                     {{"axis", kAxis},
                      {"offset", int64_t(-1)},
                      {"shape", sizes_text(program[x].shape)},
                      {"dtype", std::string(strata::name_of(program[x].dtype))}},
                     {x});
      std::rotate(program.ops.begin(), program.ops.end() - 1, program.ops.end());
      stage.wanted.insert(stage.wanted.end(), start.begin(), start.end());
    }
    if (stage_ + 1 == stages_) return;
    program.losses.clear();
    const TensorId token =
        build.emit("send", {between[size_t(stage_)]}, {{"axis", kAxis}, {"offset", int64_t(1)}}, "pipeline.sent");
    if (trains) stage.roots.push_back({token, token});
  }

  void schedule(strata::ScheduleStage& stage) override {
    if (stages_ == 1) return;
    const strata::pipeline::Problem problem{.stages = stages_, .chunks = 1, .microbatches = stage.microbatches};
    const strata::pipeline::Schedule schedule = strata::pipeline::find_schedule(schedule_).make(problem);
    strata::pipeline::require_no_deadlock(strata::pipeline::actions_of(problem, schedule));
    stage.order = schedule.order.at(size_t(stage_));
  }

 private:
  std::string schedule_ = "1f1b";
  int stages_ = 1, stage_ = 0;
};

}  // namespace

STRATA_PLUGIN(Pipeline, "pipeline", "1.0.0", "divides the model's blocks among the stages of the mesh axis pipeline")
