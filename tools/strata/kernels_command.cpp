// `bench kernels`: what each kind of op takes in a step of a configuration, beside what memory and products reach here.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "engine/runtime/measure.h"
#include "memory/atomic_file.h"
#include "strata/json.h"
#include "tools/strata/commands.h"

namespace strata {
namespace {

struct KernelRow {
  std::string kind;
  Stream stream;
  DType dtype;
  int calls = 0;
  double seconds = 0, bytes = 0, flops = 0;
};

// Of kinds, streams and types of first inputs, the longest first.
std::vector<KernelRow> rows_of(const Program& program, const std::vector<Span>& spans) {
  std::map<std::tuple<std::string, Stream, DType>, KernelRow> rows;
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    const OpView view(program, op);
    const DType dtype = view.inputs() > 0 && view.has_input(0) ? view.input(0).dtype : view.output(0).dtype;
    KernelRow& row = rows[{op.kind->name, op.stream, dtype}];
    row.kind = op.kind->name, row.stream = op.stream, row.dtype = dtype;
    ++row.calls;
    row.seconds += spans[i].finish - spans[i].start;
    const Cost cost = cost_of(view);
    row.bytes += cost.bytes;
    row.flops += cost.flops;
  }
  std::vector<KernelRow> sorted;
  for (auto& [key, row] : rows) sorted.push_back(std::move(row));
  std::sort(sorted.begin(), sorted.end(), [](const KernelRow& a, const KernelRow& b) { return a.seconds > b.seconds; });
  return sorted;
}

}  // namespace

int bench_kernels_command_main(const BenchKernelsArguments& arguments) {
  const Session session(arguments.config, arguments.sets);
  if (session.mesh.size() > 1)
    throw Error(fmt::format("bench kernels measures one rank, but [mesh] asks for {}; set its axes to 1.",
                            session.mesh.size()));
  const RunPlans plans = session.plan_run();
  const PlannedProgram& planned = plans.programs[plans.of_step(arguments.steps)];  // whose ops are timed
  const Rates& rates = planned.rates;
  const Measurement measured = measure(session, plans, arguments.steps);
  std::vector<KernelRow> rows = rows_of(planned.program(), measured.spans);
  double total = 0;
  for (const KernelRow& row : rows) total += row.stream == Stream::compute ? row.seconds : 0;
  fmt::print(
      "step {} of {}, {:.3f} s; measured on this machine: memory {:.0f} GB/s, copies {:.0f} GB/s, products {:.2f} "
      "TFLOP/s in f32, {:.2f} in 16 bits, {:.1f} us an op\n",
      arguments.steps, arguments.config, measured.seconds, rates.memory / 1e9, rates.copy / 1e9, rates.flops / 1e12,
      rates.half_flops / 1e12, rates.launch * 1e6);
  fmt::print("{:<30}{:<10}{:<6}{:>6}{:>11}{:>8}{:>10}{:>11}{:>10}{:>13}\n", "", "stream", "type", "calls", "ms",
             "share", "GB/s", "of memory", "TFLOP/s", "of products");
  Json::Array list;
  for (KernelRow& row : rows) {
    row.seconds = std::max(row.seconds, 1e-9);  // what clocks resolve
    const bool copies = row.stream == Stream::to_device || row.stream == Stream::to_host;
    const double bandwidth = (copies ? row.bytes / 2 : row.bytes) / row.seconds, speed = row.flops / row.seconds;
    const double of_memory = bandwidth / (copies ? rates.copy : rates.memory),
                 of_products = speed / (size_of(row.dtype) == 2 ? rates.half_flops : rates.flops);
    fmt::print("{:<30}{:<10}{:<6}{:>6}{:>11.3f}{:>8}{:>10.1f}{:>10.0f}%{:>10.3f}{:>12.0f}%\n", row.kind,
               name_of(row.stream), name_of(row.dtype), row.calls, row.seconds * 1e3,
               row.stream == Stream::compute ? fmt::format("{:.1f}%", 100 * row.seconds / total) : "", bandwidth / 1e9,
               100 * of_memory, speed / 1e12, 100 * of_products);
    list.push_back(Json::Object{{"kind", row.kind},
                                {"stream", std::string(name_of(row.stream))},
                                {"type", std::string(name_of(row.dtype))},
                                {"calls", int64_t(row.calls)},
                                {"seconds", row.seconds},
                                {"bytes_per_second", bandwidth},
                                {"share_of_memory", of_memory},
                                {"flops_per_second", speed},
                                {"share_of_products", of_products}});
  }
  if (!arguments.json.empty())
    write_atomically(arguments.json, Json(Json::Object{{"seconds", measured.seconds},
                                                       {"memory", rates.memory},
                                                       {"copy", rates.copy},
                                                       {"flops", rates.flops},
                                                       {"half_flops", rates.half_flops},
                                                       {"launch", rates.launch},
                                                       {"kernels", std::move(list)}})
                                             .dump(1) +
                                         "\n");
  return int(ExitCode::done);
}

}  // namespace strata
