// Kinds that count and sum, and where their results go; see report.h.
#include "plugins/moe/report.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <utility>

namespace strata::moe {
namespace {

constexpr std::string_view kReports[] = {"moe_loss", "moe_dropped", "moe_load"};

// Inputs: losses of a layer's router, as many as attribute `losses` says, then the offsets (E + 1) of its experts.
void tally(const Binding& b) {
  const int losses = int(b.attributes().integer("losses"));
  *b.out<double>(0) = 0;
  for (int i = 0; i < losses; ++i) *b.out<double>(0) += double(*b.in<float>(i));
  const auto* offsets = b.in<int32_t>(losses);
  for (int64_t e = 0; e < elements(b.output(1).shape); ++e) b.out<double>(1)[e] = double(offsets[e + 1] - offsets[e]);
}

// Inputs: losses, as many as attribute `losses` says, then the counts (E) of layers' experts, whose tokens made
// `choices` choices each.
void report(const Binding& b) {
  const int losses = int(b.attributes().integer("losses"));
  double loss = 0, dropped = 0, load = 0;
  for (int i = 0; i < losses; ++i) loss += *b.in<double>(i);
  for (int i = losses; i < b.inputs(); ++i) {
    const int64_t experts = b.input(i).shape[0];
    const auto* counts = b.in<double>(i);
    double most = 0, all = 0;
    for (int64_t e = 0; e < experts; ++e) most = std::max(most, counts[e]), all += counts[e];
    const double choices = double(b.attributes().integer("choices"));
    dropped += 1 - all / choices;
    load += most / choices * double(experts);
  }
  const double share = b.attributes().real("share");  // of the means over all ranks' layers
  *b.out<double>(0) = loss;
  *b.out<double>(1) = dropped * share;
  *b.out<double>(2) = load * share;
}

// Inputs: counts (E) of layers' experts; attribute `rows` names for each the row of the result that is its layer's.
void loads(const Binding& b) {
  const int64_t experts = b.attributes().integer("experts");
  auto* const out = b.out<double>(0);
  std::fill_n(out, elements(b.output(0).shape), 0.0);
  const std::string rows = b.attributes().string("rows");
  const double even = double(experts) / double(b.attributes().integer("choices")) * b.attributes().real("share");
  size_t at = 0;
  for (int i = 0; i < b.inputs(); ++i) {
    const int64_t row = std::stoll(rows.substr(at));
    at = rows.find(' ', at) + 1;
    for (int64_t e = 0; e < experts; ++e) out[row * experts + e] += b.in<double>(i)[e] * even;
  }
}

Kernel reporting_kernel(void (*run)(const Binding&)) {
  return {[run](const Binding& b) -> Launch { return [run, b] { run(b); }; }};
}

std::vector<TensorId> over(Builder& build, std::string_view axis, const std::vector<TensorId>& values) {
  return build.emit_all("all_reduce", values, {{"axis", std::string(axis)}, {"reduction", std::string("sum")}});
}

// Over all ranks: those with other sequences, and those with other layers.
std::vector<TensorId> over_ranks(GradientStage& stage, std::vector<TensorId> values) {
  if (stage.mesh().size(kDataAxis) > 1) values = over(stage.build(), kDataAxis, values);
  for (const Axis& axis : stage.mesh().axes())
    if (axis.own_programs && axis.size > 1) values = over(stage.build(), axis.name, values);
  return values;
}

}  // namespace

void register_report_kinds() {
  register_kind({.name = "expert_tally",
                 .summary = "losses f32 (1)…, offsets i32 (E + 1) -> their sum f64 (1), choices of each expert f64 "
                            "(E); attribute losses (number)",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.attributes().has("losses") && v.inputs() == v.attributes().integer("losses") + 1 &&
                               v.has_input(v.inputs() - 1) && v.input(v.inputs() - 1).dtype == DType::i32 &&
                               v.input(v.inputs() - 1).shape.size() == 1,
                           v, "losses and offsets i32 (E + 1), and attribute losses");
                   return {{{1}, DType::f64}, {{v.input(v.inputs() - 1).shape[0] - 1}, DType::f64}};
                 },
                 .kernels = {{"cpu", reporting_kernel(tally)}, {"reference", reporting_kernel(tally)}}});
  register_kind({.name = "expert_report",
                 .summary =
                     "losses f64 (1)…, counts f64 (E)… -> f64 (1): their sum; dropped share of choices; load of the "
                     "busiest expert; attributes losses (number), choices, share",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   require(v.attributes().has("losses") && v.inputs() >= v.attributes().integer("losses") &&
                               v.attributes().has("choices") && v.attributes().has("share"),
                           v, "losses and counts, and attributes losses, choices and share");
                   return std::vector<TensorSpec>(3, {{1}, DType::f64});
                 },
                 .kernels = {{"cpu", reporting_kernel(report)}, {"reference", reporting_kernel(report)}}});
  register_kind(
      {.name = "expert_load",
       .summary =
           "counts f64 (E)… -> f64 (layers, E): choices of each expert by the even share, of all inputs of "
           "a layer the sum times share; attributes experts, layers, rows (\"0 1 0 1\": the layer of each input), "
           "choices, share",
       .shape = [](const OpView& v) -> std::vector<TensorSpec> {
         const Attributes& a = v.attributes();
         require(a.has("experts") && a.has("layers") && a.has("rows") && a.has("choices") && a.has("share"), v,
                 "counts, and attributes experts, layers, rows, choices and share");
         for (int i = 0; i < v.inputs(); ++i)
           require(v.has_input(i) && v.input(i).dtype == DType::f64 && v.input(i).shape == Shape{a.integer("experts")},
                   v, "counts f64 (E)");
         return {{{a.integer("layers"), a.integer("experts")}, DType::f64}};
       },
       .kernels = {{"cpu", reporting_kernel(loads)}, {"reference", reporting_kernel(loads)}}});
}

void look_at_once(Program& program, size_t maker) {
  const Op& from = program.ops[maker];
  Op& op = program.ops.back();
  op.step_part = StepPart::forward;
  op.block = from.block, op.microbatch = from.microbatch, op.chunk = from.chunk;
}

bool Report::is_loss(const Op& op) {
  const std::string& kind = op.kind->name;
  return kind == "router_loss" || kind == "importance_loss" || kind == "load_loss";
}

std::string Report::name_of(int64_t layer, int64_t expert) const {
  return "moe_load." + std::to_string(layers_[size_t(layer)]) + "." + std::to_string(expert);
}

void Report::emit(GradientStage& stage) const {
  Builder& build = stage.build();
  Program& program = build.program();
  struct Layer {
    std::vector<TensorId> losses{};
    TensorId offsets{};
    size_t slots = 0;  // the op that makes them
  };
  std::map<std::pair<int, int>, Layer> told;  // by microbatch and block
  int64_t choices = 1;
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    const std::pair<int, int> place{op.microbatch, op.block};
    if (is_loss(op)) told[place].losses.push_back(op.outputs[0]);
    if (op.kind->name != "expert_slots" || op.step_part != StepPart::forward) continue;
    told[place].offsets = op.outputs[1], told[place].slots = i;
    choices = elements(build[op.inputs[0]].full_shape());
  }
  build.role = Role::workspace;
  std::vector<TensorId> losses, counts;
  std::string rows;
  for (auto& [place, layer] : told) {
    const int64_t number = int64_t(layer.losses.size());
    layer.losses.push_back(layer.offsets);
    const std::vector<TensorId> made =
        build.emit_all("expert_tally", layer.losses, {{"losses", number}}, {}, "moe.tally");
    look_at_once(program, layer.slots);
    losses.push_back(made[0]), counts.push_back(made[1]);
    const auto of = std::find(layers_.begin(), layers_.end(), int64_t{place.second});
    rows += std::to_string(of - layers_.begin()) + " ";
  }
  if (stage.mesh().size(kSequenceAxis) > 1 && !counts.empty()) counts = over(build, kSequenceAxis, counts);
  const double share = 1 / (double(microbatches_) * double(stage.mesh().size(kDataAxis)));
  Attributes attributes{
      {"losses", int64_t(losses.size())}, {"choices", choices}, {"share", share / double(layers_.size())}};
  losses.insert(losses.end(), counts.begin(), counts.end());
  const std::vector<TensorId> values =
      over_ranks(stage, build.emit_all("expert_report", losses, attributes, {}, "moe.report"));
  for (size_t i = 0; i < values.size(); ++i) {
    program.rename(values[i], std::string(kReports[i]));
    program[values[i]].step_output = true;
  }
  if (!each_) return;
  attributes = {{"experts", experts_},
                {"layers", int64_t(layers_.size())},
                {"rows", rows},
                {"choices", choices},
                {"share", share}};
  const TensorId all = over_ranks(stage, {build.emit("expert_load", counts, attributes, "moe.load_by_expert")}).front();
  program[all].step_output = true;
  for (int64_t layer = 0; layer < int64_t(layers_.size()); ++layer)
    for (int64_t e = 0; e < experts_; ++e)
      program.add_part(all, name_of(layer, e), {1}, (layer * experts_ + e) * size_of(DType::f64));
}

void Report::log(StepContext& context) const {
  if (layers_.empty()) return;
  for (const std::string_view name : kReports) context.log(name, context.scalar(name));
  for (int64_t layer = 0; each_ && layer < int64_t(layers_.size()); ++layer)
    for (int64_t e = 0; e < experts_; ++e) context.log(name_of(layer, e), context.scalar(name_of(layer, e)));
}

}  // namespace strata::moe
