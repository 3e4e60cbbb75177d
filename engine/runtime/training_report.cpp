// See training_report.h.
#include "engine/runtime/training_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>

#include "engine/runtime/usage.h"

namespace strata {
namespace {

double median_of(std::vector<double> values) {
  if (values.empty()) return NAN;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

TrainingReport::TrainingReport(const Assembly& assembly, int ranks)
    : assembly_(assembly),
      planned_(assembly.plans.main()),
      ranks_(ranks),
      compute_dtype_(strata::compute_dtype(planned_.program())),
      peak_(ranks *
            (assembly.device ? assembly.device->peak_flops(compute_dtype_) : peak_of(compute_dtype_, planned_.rates))),
      of_program_(assembly.plans.phases.programs()) {}

double TrainingReport::tokens_per_second(double seconds) const {
  return double(planned_.built.tokens_per_step) / seconds;
}
double TrainingReport::peak_share(size_t program, double seconds) const {
  return peak_ > 0 ? assembly_.plans.programs[program].built.model_flops / seconds / peak_ : 0;
}
double TrainingReport::median_tokens_per_second() const { return tokens_per_second(median_of(durations_)); }

StepLog::Fields TrainingReport::add_step(size_t program, double seconds, bool last_step) {
  const PlannedProgram& planned = assembly_.plans.programs[program];
  durations_.push_back(seconds);
  of_program_[program].seconds.push_back(seconds);
  if (peak_ > 0) peak_ = std::max(peak_, planned.built.model_flops / seconds);  // more than was known to be possible
  flops_.push_back(planned.built.model_flops / seconds);
  StepLog::Fields fields{{"tokens_per_second", tokens_per_second(seconds)},
                         {"seconds", seconds},
                         {"peak_share", peak_share(program, seconds)},
                         {"memory_bytes", double(resident_bytes())}};
  const Stalls& stalls = assembly_.executor_of(program).stalls();
  if (may_stall(planned.program()) && times(last_step)) {
    fields.push_back({"waiting_for_nvme", stalls.storage()});
    fields.push_back({"waiting_for_copies", stalls.copies()});
    fields.push_back({"restoring", stalls.restoring});
    of_program_[program].stalls.push_back(stalls);
  }
  if (ranks_ > 1 && (times(last_step) || !exchanges_in_queue(assembly_.groups))) {
    fields.push_back({"waiting_for_ranks", stalls.ranks()});
    fields.push_back({"exchanging", stalls.exchanging});
    exchanges_.push_back(stalls.exchanging);
    waits_.push_back(stalls.ranks());
  }
  return fields;
}

void TrainingReport::add_busy(const Executor& executor) {
  const std::vector<Span>& spans = executor.spans();
  if (spans.empty()) return;
  double busy = 0;
  for (size_t i = 0; i < spans.size(); ++i)
    if (executor.program().ops[i].stream == Stream::compute) busy += spans[i].finish - spans[i].start;
  busy_.push_back(busy);
}
double TrainingReport::median_busy() const { return busy_.empty() ? 0 : median_of(busy_); }

void TrainingReport::print(double validation_loss) const {
  print_speed();
  if (!std::isnan(validation_loss)) fmt::print("validation loss {:.4f} nats a token\n", validation_loss);
  print_exchanges();
  print_predictions();
  print_memory();
}

void TrainingReport::print_speed() const {
  const double median = median_of(durations_);
  if (std::isnan(median)) return;
  const std::string peak = assembly_.device ? fmt::format("the dense peak of {} on {}", name_of(compute_dtype_),
                                                          assembly_.device->describe())
                                            : fmt::format("the {} peak measured on {} threads", name_of(compute_dtype_),
                                                          assembly_.threads.count() * ranks_);
  fmt::print("median {:.0f} tokens/s{}\n", tokens_per_second(median),
             peak_ == 0 ? "" : fmt::format(", {:.1f}% of {}", median_of(flops_) / peak_ * 100, peak));
}

void TrainingReport::print_exchanges() const {
  const double exchanging = median_of(exchanges_), waiting = median_of(waits_);
  if (!(exchanging > 0)) return;
  fmt::print("exchanges of rank 0: {:.3f} s a step, {:.3f} s of compute waited for them: {:.0f}% hidden", exchanging,
             waiting, hidden_percent(exchanging, waiting));
  const Stalls& predicted = assembly_.plans.programs[assembly_.plans.usual()].prediction->stalls;
  if (!busiest_)  // stages of a pipeline are in exchanges while they wait for each other
    fmt::print(" (predicted: {:.3f}, {:.3f}, {:.0f}%)", predicted.exchanging, predicted.ranks(),
               hidden_percent(predicted.exchanging, predicted.ranks()));
  fmt::print("\n");
}

void TrainingReport::print_predictions() const {
  for (size_t p = 0; p < of_program_.size(); ++p) {
    if (of_program_.size() > 1 && of_program_[p].seconds.empty()) continue;
    if (of_program_.size() > 1)
      fmt::print("{}, {} steps\n", assembly_.plans.programs[p].title(), of_program_[p].seconds.size());
    print_prediction(p);
  }
  if (const std::string assumed = assumed_text(planned_.rates); !assumed.empty()) fmt::print("{}\n", assumed);
  if (planned_.rates.disturbed) fmt::print("rates: {}\n", disturbed_text(planned_.rates));
}

void TrainingReport::print_prediction(size_t program) const {
  const Prediction& predicted = *assembly_.plans.programs[program].prediction;
  const Steps& steps = of_program_[program];
  const auto row = [](const char* name, double planned, double measured) {
    fmt::print("{:<18}{:>14.3f}{:>14.3f}\n", name, planned, measured);
  };
  fmt::print("{:<18}{:>14}{:>14}\n", "a step, seconds", "predicted", "measured");
  row("in all", predicted.seconds, median_of(steps.seconds));
  if (program == assembly_.plans.usual() && busiest_ && busiest_->second > 0) {
    row("busiest stage", busiest_->first, busiest_->second);
    fmt::print("{:<18}{:>13.1f}%{:>13.1f}%\n", "bubble", 100 * (predicted.seconds / busiest_->first - 1),
               100 * (median_of(steps.seconds) / busiest_->second - 1));
  }
  if (steps.stalls.empty()) return;
  const auto stall = [&](const char* name, const std::function<double(const Stalls&)>& figure) {
    std::vector<double> all;
    for (const Stalls& stalls : steps.stalls) all.push_back(figure(stalls));
    row(name, figure(predicted.stalls), median_of(all));
  };
  stall("waiting for NVMe", &Stalls::storage);
  stall("waiting for copies", &Stalls::copies);
  if (predicted.stalls.host() > 0) stall("waiting for host", &Stalls::host);
  if (ranks_ > 1) stall("waiting for ranks", &Stalls::ranks);
  stall("running again", [](const Stalls& stalls) { return stalls.restoring; });
}

void TrainingReport::print_memory() const {
  if (assembly_.device) {  // what is beyond the plan is the libraries' own
    fmt::print("device memory: planned {}, taken {}\n", bytes_text(planned_.arena_bytes[int(Tier::device)]),
               bytes_text(assembly_.free_before - assembly_.device->free_bytes()));
  } else {  // a device's arenas are allocated whole
    for (Tier tier : {Tier::device, Tier::host})
      if (planned_.memory[tier].total_bytes() > 0) print_tier(tier);
  }
  if (planned_.snapshot_bytes > 0) fmt::print("{:<18}{:>14}\n", "saving behind", bytes_text(planned_.snapshot_bytes));
  if (const int64_t stored = planned_.arena_bytes[int(Tier::nvme)]; stored > 0)
    fmt::print("{:<18}{:>14}\n", "on NVMe", bytes_text(stored));
  fmt::print("{:<18}{:>14}{:>14}\n", "process, peak", bytes_text(planned_.process.total()),
             bytes_text(peak_resident_bytes()));
}

void TrainingReport::print_tier(Tier tier) const {
  const Storage& storage = assembly_.storage;
  const auto row = [](std::string_view name, const std::string& planned, const std::string& measured) {
    fmt::print("{:<18}{:>14}{:>14}\n", name, planned, measured);
  };
  Ledger resident{};
  for (const Tensor& tensor : storage.persistent_tensors())
    if (tensor.home == tier)
      resident[int(tensor.role)] +=
          resident_bytes(static_cast<std::byte*>(storage.persistent(tensor.name.text())), tensor.bytes());
  row(memory_name(planned_.program(), tier), "planned", "measured");
  // Beside persistent tensors, what the program that takes most has at its peak.
  const auto& programs = assembly_.plans.programs;
  const auto& plan = std::max_element(programs.begin(), programs.end(), [&](const auto& a, const auto& b) {
                       return a.memory[tier].total_bytes() < b.memory[tier].total_bytes();
                     })->memory[tier];
  for (int r = 0; r < kRoles; ++r)
    if (plan.at_peak[r] > 0)
      row(name_of(Role(r)), bytes_text(plan.at_peak[r]), resident[r] > 0 ? bytes_text(resident[r]) : "");
  const int64_t arena = planned_.arena_bytes[int(tier)];
  row("all transient", bytes_text(arena - plan.persistent_bytes),
      bytes_text(resident_bytes(storage.transient(tier), storage.bytes(tier) - storage.persistent_bytes(tier))));
  row("arena", bytes_text(arena), bytes_text(resident_bytes(storage.base(tier), storage.bytes(tier))));
}

}  // namespace strata
