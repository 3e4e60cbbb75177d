// Pipelines: each stage keeps its blocks of the model's program, what comes from the stage before is received at the
// start, what the next one needs is sent at the end. Gradients go back by the gradient rules of send and receive.
#include <algorithm>
#include <map>

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

// What stages need of each other.
struct Crossings {
  std::vector<std::vector<TensorId>> borders;   // by stage but the last: what it makes for the next one, in order
  std::map<int32_t, std::vector<int>> holders;  // by parameter: the stages that read it
};

// Sums over stages are taken in their order. That is the order of one rank where each adds one number.
void require_one_sum(const Program& program, const Crossings& crossings) {
  std::map<int32_t, int> readers;
  for (const Op& op : program.ops)
    for (TensorId id : op.inputs)
      if (id && program[id].role == strata::Role::parameter) ++readers[id.value];
  for (const auto& [id, stages] : crossings.holders)
    if (stages.size() > 1 && readers[id] > 2)
      throw Error("\"" + program[{id}].name + "\" is used by " + std::to_string(readers[id]) +
                  " ops on several stages; their gradients cannot be summed in the order of one rank, as "
                  "run.reproducible promises. Unset it, or set mesh.pipeline = 1.");
}

Crossings crossings_of(const Program& program, const std::vector<int>& stage_of, int stages) {
  Crossings found{.borders = std::vector<std::vector<TensorId>>(size_t(stages - 1)), .holders = {}};
  std::vector<int> maker(program.tensors.size(), -1);
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const int stage = stage_of[i];
    for (TensorId id : program.ops[i].inputs) {
      if (!id) continue;
      if (program[id].role == strata::Role::parameter) {
        std::vector<int>& holders = found.holders[id.value];
        if (holders.empty() || holders.back() != stage) holders.push_back(stage);
      }
      const int from = maker[size_t(id.value)];
      if (from < 0 || from == stage) continue;
      if (from + 1 != stage)
        throw Error("\"" + program[id].name + "\" is made on stage " + std::to_string(from) + " and read on stage " +
                    std::to_string(stage) +
                    "; the model can be cut only where all that crosses is for the next stage.");
      std::vector<TensorId>& border = found.borders[size_t(from)];
      if (std::find(border.begin(), border.end(), id) == border.end()) border.push_back(id);
    }
    for (TensorId id : program.ops[i].outputs) maker[size_t(id.value)] = stage;
  }
  for (std::vector<TensorId>& border : found.borders) std::sort(border.begin(), border.end());
  return found;
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

  strata::Capabilities capabilities() const override { return {.provides = {"splits over " + kAxis}}; }

  void forward(strata::ProgramStage& stage) override {
    stages_ = stage.mesh.size(kAxis);
    stage_ = stage.mesh[kAxis].coordinate;
    const bool trains = stage.goal == strata::Goal::train;
    if (stages_ == 1 && !trains) return;
    if (stages_ == 1)
      throw Error("pipeline divides the model among the stages of axis \"" + kAxis + "\", which has one; set mesh." +
                  kAxis + " to their number, or leave the plugin out.");
    Program& program = stage.program;
    const std::vector<int> stage_of = stages_of(program, stages_);
    const Crossings crossings = crossings_of(program, stage_of, stages_);
    if (stage.batch.reproducible && trains) require_one_sum(program, crossings);
    for (const auto& [id, holders] : crossings.holders)
      if (holders.size() > 1 && std::find(holders.begin(), holders.end(), stage_) != holders.end())
        stage.shared.push_back({.parameter = {id}, .axis = kAxis, .holders = holders});
    size_t i = 0;
    std::erase_if(program.ops, [&](const Op&) { return stage_of[i++] != stage_; });
    if (stage_ > 0) receive(stage, crossings.borders[size_t(stage_ - 1)]);
    if (stage_ + 1 == stages_) return;
    program.losses.clear();
    strata::Builder build(program);
    for (TensorId id : crossings.borders[size_t(stage_)]) {
      const TensorId token = build.emit("send", {id}, {{"axis", kAxis}, {"offset", int64_t(1)}}, "pipeline.sent");
      if (trains) stage.roots.push_back({token, token});
    }
  }

  void schedule(strata::ScheduleStage& stage) override {
    if (stages_ == 1) return;
    const strata::pipeline::Problem problem{.stages = stages_, .chunks = 1, .microbatches = stage.microbatches};
    const strata::pipeline::Schedule schedule = strata::pipeline::find_schedule(schedule_).make(problem);
    strata::pipeline::require_no_deadlock(strata::pipeline::actions_of(problem, schedule));
    stage.order = schedule.order.at(size_t(stage_));
  }

 private:
  // In front of everything else. The token that each is given has a gradient: that sends back the gradient of what
  // came.
  static void receive(strata::ProgramStage& stage, const std::vector<TensorId>& tensors) {
    Program& program = stage.program;
    strata::Builder build(program);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const TensorId x = tensors[i];
      std::vector<TensorId> start;
      if (stage.goal == strata::Goal::train)
        start.push_back(build.data("pipeline.start" + (i > 0 ? "." + std::to_string(i) : ""), {1}, strata::DType::u8));
      build.emit_all("receive", start,
                     {{"axis", kAxis},
                      {"offset", int64_t(-1)},
                      {"shape", sizes_text(program[x].shape)},
                      {"dtype", std::string(strata::name_of(program[x].dtype))}},
                     {x});
      stage.wanted.insert(stage.wanted.end(), start.begin(), start.end());
    }
    std::rotate(program.ops.begin(), program.ops.end() - int64_t(tensors.size()), program.ops.end());
  }

  std::string schedule_ = "1f1b";
  int stages_ = 1, stage_ = 0;
};

}  // namespace

STRATA_PLUGIN(Pipeline, "pipeline", "1.0.0", "divides the model's blocks among the stages of the mesh axis pipeline")
