// Tensors and ops to JSON; see graph.h.
#include "engine/planning/graph.h"

#include "strata/json.h"

namespace strata {
namespace {

Json::Array numbers(const TensorIds& ids) {
  Json::Array list;
  for (TensorId id : ids) list.emplace_back(int64_t{id.value});
  return list;
}

Json tensor_json(const Program& program, const MemoryPlan& plan, size_t t) {
  const Tensor& tensor = program.tensors[t];
  const int32_t buffer = plan.buffer_of[t];
  const int64_t bytes = buffer < 0 || tensor.part_of ? tensor.bytes() : plan.buffers[size_t(buffer)].bytes;
  return Json::Object{{"name", std::string(tensor.name)},
                      {"role", std::string(name_of(tensor.role))},
                      {"bytes", bytes},
                      {"persistent", tensor.persistent}};
}

// What an output may take over: its addend, else what the kind allows.
Json::Array in_place_json(const OpView& view) {
  Json::Array pairs;
  const auto add = [&](int output, TensorId input) {
    pairs.push_back(Json::Array{int64_t{view.op().outputs[size_t(output)].value}, int64_t{input.value}});
  };
  for (int o = 0; o < view.outputs(); ++o)
    if (view.accumulates(o)) add(o, view.addend(o));
  for (const auto& [output, input] : view.op().kind->in_place)
    if (output < view.outputs() && !view.accumulates(output) && view.has_input(input))
      add(output, view.op().inputs[size_t(input)]);
  return pairs;
}

Json op_json(const Program& program, const MemoryPlan& plan, const Rates& rates, size_t i) {
  const Op& op = program.ops[i];
  const OpView view(program, op);
  const int32_t workspace = plan.workspace_of[i];
  return Json::Object{{"kind", op.kind->name},
                      {"part", std::string(name_of(op.step_part))},
                      {"block", op.block},
                      {"microbatch", op.microbatch},
                      {"stream", std::string(name_of(op.stream))},
                      {"purpose", std::string(name_of(op.purpose))},
                      {"seconds", seconds_of(view, rates)},
                      {"workspace", workspace < 0 ? 0 : plan.buffers[size_t(workspace)].bytes},
                      {"inputs", numbers(op.inputs)},
                      {"outputs", numbers(op.outputs)},
                      {"in_place", in_place_json(view)}};
}

}  // namespace

std::string graph_json(std::span<const NamedPlan> plans) {
  Json::Array programs;
  for (const auto& [name, program, memory, rates] : plans) {
    Json::Array tensors, ops;
    for (size_t t = 0; t < program->tensors.size(); ++t) tensors.push_back(tensor_json(*program, *memory, t));
    for (size_t i = 0; i < program->ops.size(); ++i) ops.push_back(op_json(*program, *memory, *rates, i));
    const TierPlan& device = memory->device();
    programs.push_back(Json::Object{{"name", name},
                                    {"device", Json::Object{{"persistent_bytes", device.persistent_bytes},
                                                            {"live_peak_bytes", device.live_peak_bytes},
                                                            {"arena_bytes", device.total_bytes()}}},
                                    {"tensors", std::move(tensors)},
                                    {"ops", std::move(ops)}});
  }
  return Json(Json::Object{{"programs", std::move(programs)}}).dump() + "\n";
}

}  // namespace strata
