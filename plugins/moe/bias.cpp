// Counts of choices, summed over ranks, and the step of a bias; see bias.h.
#include "plugins/moe/bias.h"

#include <algorithm>
#include <map>
#include <vector>

#include "plugins/moe/report.h"

namespace strata::moe {
namespace {

void count(const Binding& b) {
  auto* const counts = b.out<double>(0);
  if (!b.accumulates(0)) std::fill_n(counts, elements(b.output(0).shape), 0.0);
  for (int64_t n = 0; n < elements(b.input(0).shape); ++n) counts[b.in<int32_t>(0)[n]] += 1;
}

void step(const Binding& b) {
  const int64_t experts = elements(b.input(1).shape);
  const auto* counts = b.in<double>(1);
  double mean = 0;
  for (int64_t e = 0; e < experts; ++e) mean += counts[e] / double(experts);
  const auto rate = float(b.attributes().real("rate"));
  for (int64_t e = 0; e < experts; ++e)
    b.out<float>(0)[e] = b.in<float>(0)[e] + (counts[e] < mean ? rate : counts[e] > mean ? -rate : 0.0f);
}

Kernel kernel_of(void (*run)(const Binding&)) {
  return {[run](const Binding& b) -> Launch { return [run, b] { run(b); }; }};
}

}  // namespace

void register_bias_kinds() {
  register_kind({.name = "expert_counts",
                 .summary = "choices i32 (…, k) -> f64 (E): how many of each expert; attribute experts",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.inputs() == 1 && v.has_input(0) && v.input(0).dtype == DType::i32 &&
                               v.attributes().has("experts"),
                           v, "choices i32 and attribute experts");
                   return {{{v.attributes().integer("experts")}, DType::f64}};
                 },
                 .accumulates = 1,
                 .kernels = {{"cpu", kernel_of(count)}, {"reference", kernel_of(count)}}});
  register_kind({.name = "balance_bias",
                 .summary = "bias f32 (E), counts f64 (E), [waits for] -> bias a step nearer to an even load; "
                            "attribute rate",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require((v.inputs() == 2 || v.inputs() == 3) && v.has_input(0) && v.input(0).dtype == DType::f32 &&
                               v.has_input(1) && v.input(1).dtype == DType::f64 &&
                               v.input(0).shape == v.input(1).shape && v.attributes().has("rate"),
                           v, "bias f32 (E), counts f64 (E) and attribute rate");
                   return {{v.input(0).shape, DType::f32}};
                 },
                 .in_place = {{0, 0}},
                 .kernels = {{"cpu", kernel_of(step)}, {"reference", kernel_of(step)}}});
}

void update_biases(UpdateStage& stage, double rate) {
  Builder& build = stage.build();
  std::map<TensorId, std::vector<size_t>> routes;  // by bias
  std::map<int, TensorId> last;                    // by block: what its backward passes make last
  for (size_t i = 0; i < build.program().ops.size(); ++i) {
    const Op& op = build.program().ops[i];
    if (op.step_part == StepPart::backward && op.outputs[0]) last[op.block] = op.outputs[0];
    if (op.kind->name == "route" && op.step_part == StepPart::forward && op.inputs.size() == 2 && op.inputs[1])
      routes[op.inputs[1]].push_back(i);
  }
  for (const auto& [bias, list] : routes) {
    build.role = Role::workspace;
    TensorId counts, choices;
    for (size_t route : list) {
      const TensorId before = counts;
      choices = build.program().ops[route].outputs[1];
      counts = build.emit("expert_counts", {choices}, {{"experts", elements(build[bias].shape)}});
      if (before) build.accumulate_onto(0, before);
      look_at_once(build.program(), route);
    }
    std::vector<std::string> axes{std::string(kDataAxis)};  // whose ranks have other choices
    for (const Split& split : build[choices].layout) axes.push_back(split.axis);
    for (const std::string& axis : axes)
      if (stage.mesh().size(axis) > 1)
        counts = build.emit("all_reduce", {counts}, {{"axis", axis}, {"reduction", std::string("sum")}});
    // Before that the backward passes may make choices again, which they do with the bias as it was.
    build.emit_all("balance_bias", {bias, counts, last[build.program().ops[list[0]].block]}, {{"rate", rate}}, {bias});
  }
}

}  // namespace strata::moe
