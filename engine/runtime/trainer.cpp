// The step loop; see trainer.h.
#include "engine/runtime/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <system_error>

#include "engine/checkpoint/external_files.h"
#include "engine/checkpoint/store.h"
#include "engine/data/sampler.h"
#include "engine/data/token_file.h"
#include "engine/planning/localize.h"
#include "engine/planning/trace.h"
#include "engine/runtime/executor.h"
#include "engine/runtime/feed.h"
#include "engine/runtime/log.h"
#include "engine/runtime/ranks.h"
#include "engine/runtime/run_directory.h"
#include "engine/runtime/same_model.h"
#include "engine/runtime/saver.h"
#include "engine/runtime/usage.h"

namespace strata {
namespace {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Notes final : public CheckpointNotes {
 public:
  explicit Notes(std::map<std::string, std::string>& values) : values_(values) {}
  void put(std::string_view name, std::string_view value) override { values_[prefix + std::string(name)] = value; }
  std::optional<std::string> get(std::string_view name) const override {
    const auto found = values_.find(prefix + std::string(name));
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  std::string prefix;

 private:
  std::map<std::string, std::string>& values_;
};

class Loop final : public StepContext {
 public:
  Loop(Session& session, const TrainOptions& options)
      : session_(session),
        trace_(options.trace),
        stop_(options.stop),
        alone_(single_world()),
        world_(session.world ? *session.world : *alone_),
        threads_(session.threads(), session.cut()),
        training_(session.plan(Goal::train)) {
    std::vector<const MemoryPlan*> also;
    if (!session.data.validation.empty()) {
      validation_ = session.plan(Goal::evaluate, &training_);
      also.push_back(&validation_->memory);
    }
    dataset_.emplace(session.data.train, training_.built.vocabulary);
    require_same_plan(world_, training_.program(), std::to_string(dataset_->tokens()) + " tokens");
    make_own(training_, Goal::train);
    if (validation_) make_own(*validation_, Goal::evaluate);
    if (stop_before_first_step()) return;
    device_ = open_device(session.device.backend, int(session.device.index), world_.local_rank());
    if (device_ && session.device.memory.count > device_->free_bytes())
      throw Error("device.memory = " + bytes_text(session.device.memory.count) + ", but " + device_->describe() +
                  " has " + bytes_text(device_->free_bytes()) + " free; lower it.");
    if (device_) free_before_ = device_->free_bytes();
    storage_.emplace(training_.program(), training_.memory, also, session.storage_faults, device_.get());
    if (device_) tell(device_->describe());
    if (!storage_->note().empty()) tell("note: " + storage_->note());
    groups_ = make_groups(world_, session.mesh, device_.get(), session.network, session.run.reproducible);
    if (device_ && world_.size() > 1)
      tell(exchanges_in_queue(groups_) ? "exchanges: NCCL" : "exchanges: through host memory");
    sampler_.emplace(*dataset_, session.data.sequence_length, session.data.shuffle, uint64_t(session.run.seed));
    executor_.emplace(training_.program(), training_.memory, *storage_, session.device.backend, threads_,
                      std::max(1, int(session.host.threads)), &groups_, patience(session.network.timeout));
    require_same_exchanges(world_, session.mesh, executor_->exchanges());
    if (!session.device.graphs) executor_->without_graphs();
    feed_.emplace(*executor_, session.batch(Goal::train));
    if (validation_) {
      validation_set_.emplace(session.data.validation, training_.built.vocabulary);
      validation_sampler_.emplace(*validation_set_, session.data.sequence_length, false, 0);
      evaluator_.emplace(validation_->program(), validation_->memory, *storage_, session.device.backend, threads_, 1,
                         &groups_, patience(session.network.timeout));
      require_same_exchanges(world_, session.mesh, evaluator_->exchanges());
      validation_feed_.emplace(*evaluator_, session.batch(Goal::evaluate));
    }
    if (!trace_.empty() && first_rank()) {
      trace_file_.emplace(trace_);
    }
    start(options.resume);
  }

  TrainSummary run() {
    if (stopping_) return {.steps = step_, .interrupted = true, .unsaved = ""};
    double peak =
        world_.size() * (device_ ? device_->peak_flops(compute_dtype_) : peak_of(compute_dtype_, training_.rates));
    const double began = seconds_now();
    const int64_t first = step_;
    std::vector<double> durations;
    double validation_loss = NAN;
    while (step_ < steps() && !stopping_) {
      ++step_;
      const double step_began = seconds_now();
      extra_.clear();
      // A device's ops are timed in the last step alone: it costs events around each.
      const bool timed = !device_ || step_ == steps();
      if (device_ && timed) executor_->trace();
      one_step();
      const double seconds = seconds_now() - step_began;
      durations.push_back(seconds);
      const double tokens_per_second = double(training_.built.tokens_per_step) / seconds;
      if (peak > 0) peak = std::max(peak, training_.built.model_flops / seconds);  // more than was known to be possible
      const double share = peak > 0 ? training_.built.model_flops / seconds / peak : 0;
      StepLog::Fields fields{{"step", double(step_)},
                             {"loss", loss_},
                             {"tokens_per_second", tokens_per_second},
                             {"seconds", seconds},
                             {"peak_share", share}};
      if (may_stall_ && timed) {
        const Stalls& stalls = executor_->stalls();
        fields.push_back({"waiting_for_nvme", stalls.storage()});
        fields.push_back({"waiting_for_copies", stalls.copies()});
        fields.push_back({"restoring", stalls.restoring});
        stalls_.push_back(stalls);
      }
      if (world_.size() > 1 && (timed || !exchanges_in_queue(groups_))) {
        fields.push_back({"waiting_for_ranks", executor_->stalls().ranks()});
        fields.push_back({"exchanging", executor_->stalls().exchanging});
        exchanges_.push_back(executor_->stalls().exchanging);
        waits_.push_back(executor_->stalls().ranks());
      }
      fields.insert(fields.end(), extra_.begin(), extra_.end());
      if (evaluator_ &&
          (step_ == steps() || (session_.run.validate_every > 0 && step_ % session_.run.validate_every == 0))) {
        validation_loss = validate();
        fields.push_back({"validation_loss", validation_loss});
        share_stop();
      }
      if (log_) warn(log_->write(fields));
      const double left = (seconds_now() - began) / double(step_ - first) * double(steps() - step_);
      std::string line = fmt::format("step {}/{}  loss {:.4f}  {:.0f} tokens/s  {:.0f}% of {} peak  memory {}  {} left",
                                     step_, steps(), loss_, tokens_per_second, share * 100, name_of(compute_dtype_),
                                     bytes_text(peak_resident_bytes()), duration_text(left));
      if (!std::isnan(validation_loss)) line += fmt::format("  validation {:.4f}", validation_loss);
      if (first_rank() && (step_ % session_.run.log_every == 0 || step_ == steps())) progress_.show(line);
      if (step_ == steps() || stopping_ ||
          (session_.run.checkpoint_every > 0 && step_ % session_.run.checkpoint_every == 0)) {
        save();
        share_stop();
      }
    }
    if (const std::string behind = saver_->finish(); unsaved_.empty()) unsaved_ = behind;
    if (log_ && log_->lost() > 0) warn(fmt::format("log.jsonl lacks {} lines.", log_->lost()));
    progress_.finish();
    write_trace();
    if (first_rank() && !executor_->spans().empty() && !durations.empty())
      learn_rates(session_.rates_wanted(training_.program()), training_.program(), executor_->spans(), training_.rates);
    const double median = median_of(durations);
    if (first_rank()) try {
        report(durations.empty() || peak == 0 ? NAN : training_.built.model_flops / median / peak,
               double(training_.built.tokens_per_step) / median, validation_loss);
      } catch (const std::system_error&) {  // whoever was to read it is gone; what counts is saved
      }
    return {.steps = step_,
            .made = step_ - first,
            .loss = loss_,
            .validation_loss = validation_loss,
            .tokens_per_second = double(training_.built.tokens_per_step) / median,
            .interrupted = stopping_ && step_ < steps(),
            .unsaved = unsaved_.empty() ? "" : end_unsaved()};
  }

  int64_t step() const override { return step_; }
  int64_t steps() const override { return session_.run.steps; }
  double scalar(std::string_view name) const override {
    const Program& program = training_.program();
    const TensorId id = program.find(name);
    if (!id || elements(program[id].shape) != 1)
      throw Error("no scalar is named \"" + std::string(name) + "\" in this program.");
    return read_scalar(program, id, executor_->pointer(id));
  }
  void set_scalar(std::string_view name, double value) override { storage_->set_scalar(name, value); }
  void log(std::string_view name, double value) override { extra_.emplace_back(name, value); }

 private:
  // Nothing is written before everything that can be wrong with the input has been looked at. Rank 0 looks at the run's
  // folder and keeps it to this run; the others take its word.
  void start(bool resume) {
    if (first_rank()) directory_.emplace(session_.run.directory, resume);
    if (directory_) warn(directory_->problem());
    const std::string newest = world_.broadcast(directory_ ? directory_->newest() : "");
    saver_.emplace(*storage_, session_.mesh, world_, threads_, session_.run.directory, int(session_.run.keep),
                   session_.run.save_behind);
    if (resume)
      go_on_from(newest);
    else
      begin();
    require_same_start(world_, step_);
    if (first_rank()) log_.emplace(session_.run.directory + "/log.jsonl", step_);
    stop_before_first_step();  // and all have loaded
    if (resume && !stopping_) tell(fmt::format("resuming after step {} from {}", step_, newest));
  }
  void begin() {
    storage_->initialize(uint64_t(session_.run.seed), threads_);
    if (session_.run.initialize.empty()) return;
    const std::string from = find_checkpoint(session_.run.initialize, "run.initialize");
    load(from, false);
    if (first_rank()) hand_on_companions(from, session_.run.directory);  // the tokenizer of an imported model
  }
  void go_on_from(const std::string& checkpoint) {
    if (checkpoint.empty())
      throw Error("rank 0 begins a new run, and rank " + std::to_string(world_.rank()) +
                  " is to resume one; give --resume to all ranks or to none.");
    try {
      load(checkpoint, true);
    } catch (const Error& error) {
      throw Error(error.what() + older_checkpoint(session_.run.directory, checkpoint), error.code());
    }
    require_steps_left(checkpoint, step_, steps());
  }

  void load(const std::string& path, bool everything) {
    const CheckpointInfo info = saver_->load(path, everything, [&](const CheckpointInfo& of) {
      require_same_model(session_.config, of.config, path, session_.run.plugin_path);
    });
    if (!everything) return;
    step_ = info.step;
    samples_ = info.samples;
    auto notes = info.notes;
    Notes view(notes);
    for (const NamedPlugin& named : session_.plugins) {
      view.prefix = named.name + ".";
      named.plugin->restore(view);
    }
  }

  // What went wrong is told when more steps follow; the end of the run says it otherwise.
  void save() {
    std::map<std::string, std::string> values;
    Notes notes(values);
    for (const NamedPlugin& named : session_.plugins) {
      notes.prefix = named.name + ".";
      named.plugin->save(notes);
    }
    warn_unsaved(saver_->finish());  // the one before, written behind
    unsaved_ = saver_->save({step_, samples_, values, session_.config.text()});
    if (!stopping_ && step_ < steps()) warn_unsaved(unsaved_);
  }
  void warn_unsaved(const std::string& problem) {
    if (!problem.empty())
      warn(fmt::format("a checkpoint was not saved: {} The run goes on; the last good checkpoint is {}.", problem,
                       saver_->latest().value_or("none")));
  }
  std::string end_unsaved() const {
    const auto good = saver_->latest();
    return fmt::format("the run ended after step {}, which was not saved: {} {}", step_, unsaved_,
                       good ? "The last good checkpoint is " + *good + "; --resume goes on from there."
                            : "There is no checkpoint of it.");
  }
  void warn(const std::string& problem) {
    if (!problem.empty()) tell("warning: " + problem);
  }

  void one_step() {
    set_scalar(kStepScalar, double(step_));
    set_scalar(kSeedScalar, double(session_.run.seed));
    set_scalar(kLearningRateFactor, 1);
    each_plugin("step_start", [&](Plugin& plugin) { plugin.step_start(*this); });
    at_stage(Stage::load, true);
    feed_->fill(*sampler_, samples_ + session_.mesh["data"].coordinate * session_.batch(Goal::train).microbatches *
                                          session_.data.micro_batch);
    at_stage(Stage::load, false);
    try {
      executor_->run([&](Stage stage, bool start) { at_stage(stage, start); });
    } catch (const NonFinite& what) {
      std::string first = executor_->first_non_finite();
      if (first.empty()) first = "none on a second run";
      throw Error(
          fmt::format("step {}: {} {} The last good checkpoint is {}. A lower learning rate, warm-up or clipping "
                      "usually helps.",
                      step_, what.what(),
                      device_ ? "It was found when the step was over."
                              : "The first tensor that was not finite: " + first + ". No update was made.",
                      saver_->latest().value_or("none")),
          ExitCode::failed);
    }
    at_stage(Stage::publish, true);
    share_loss();
    samples_ += session_.data.global_batch;
    at_stage(Stage::publish, false);
    each_plugin("step_end", [&](Plugin& plugin) { plugin.step_end(*this); });
  }

  bool asked_to_stop() const { return stop_ && *stop_; }
  // Whether any rank is asked to stop, known to all alike. In the loop with the losses of the step, see below.
  bool stop_before_first_step() {
    for (const std::string& asked : world_.gather(asked_to_stop() ? "stop" : "")) stopping_ |= !asked.empty();
    return stopping_;
  }
  void share_stop() {
    for (const double asked : values_of_ranks(groups_, {double(asked_to_stop())})) stopping_ |= asked != 0;
  }

  // The losses of all microbatches in order, and whether anybody was asked to stop.
  void share_loss() {
    std::vector<double> values = feed_->losses();
    values.push_back(double(asked_to_stop()));
    const size_t count = values.size();
    values = values_of_ranks(groups_, std::move(values));
    loss_ = 0;
    for (size_t i = 0; i < values.size(); ++i)
      if (i % count + 1 < count)
        loss_ += values[i];
      else
        stopping_ |= values[i] != 0;
  }

  bool first_rank() const { return world_.rank() == 0; }
  void tell(const std::string& text) {
    if (first_rank()) progress_.message(text);
  }
  void make_own(PlannedProgram& planned, Goal goal) {
    planned.built.program.storage_directory = rank_directory(planned.program().storage_directory, world_);
    localize(planned.built.program, session_.mesh, session_.batch(goal).microbatches);
  }
  void at_stage(Stage stage, bool start) {
    each_plugin(start ? "stage_start" : "stage_end", [&](Plugin& plugin) {
      if (start)
        plugin.stage_start(*this, stage);
      else
        plugin.stage_end(*this, stage);
    });
  }

  template <class Call>
  void each_plugin(std::string_view hook, Call&& call) {
    for (const NamedPlugin& named : session_.plugins) {
      try {
        call(*named.plugin);
      } catch (const std::exception& error) {
        throw Error(fmt::format("plugin \"{}\", {}, step {}: {}", named.name, hook, step_, error.what()),
                    ExitCode::failed);
      }
    }
  }

  double validate() {
    const int64_t available = validation_sampler_->sequences() / session_.data.micro_batch;
    const int64_t batches = std::clamp<int64_t>(session_.run.validate_batches, 1, std::max<int64_t>(available, 1));
    // Ranks take turns; what there is too much of is repeated and not counted.
    const int64_t ranks = world_.size();
    double sum = 0;
    for (int64_t i = 0; i < batches; i += ranks) {
      const int64_t mine = (i + world_.rank()) % batches;
      validation_feed_->fill(*validation_sampler_, mine * session_.data.micro_batch);
      evaluator_->run();
      const std::vector<double> losses = values_of_ranks(groups_, {validation_feed_->loss()});
      for (int64_t r = 0; r < ranks && i + r < batches; ++r) sum += losses[size_t(r)];
    }
    return sum / double(batches);
  }

  static double median_of(std::vector<double> values) {
    if (values.empty()) return NAN;
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }

  // The last step's, when asked for.
  void write_trace() {
    if (!trace_file_ || executor_->spans().empty()) return;
    trace_file_->write(chrome_trace(training_.program(), training_.memory, executor_->spans()));
    trace_file_->commit();
    tell(trace_ + ": the last step; open it in ui.perfetto.dev or chrome://tracing");
  }

  void report(double share, double tokens_per_second, double validation_loss) const {
    if (!std::isnan(tokens_per_second)) {
      const std::string peak =
          device_ ? fmt::format("the dense peak of {} on {}", name_of(compute_dtype_), device_->describe())
                  : fmt::format("the {} peak measured on {} threads", name_of(compute_dtype_),
                                threads_.count() * world_.size());
      fmt::print("median {:.0f} tokens/s{}\n", tokens_per_second,
                 std::isnan(share) ? "" : fmt::format(", {:.1f}% of {}", share * 100, peak));
    }
    if (!std::isnan(validation_loss)) fmt::print("validation loss {:.4f} nats a token\n", validation_loss);
    if (const double exchanging = median_of(exchanges_), waiting = median_of(waits_); exchanging > 0)
      fmt::print("exchanges of rank 0: {:.3f} s a step, {:.3f} s of compute waited for them: {:.0f}% hidden\n",
                 exchanging, waiting, 100 * std::max(0.0, 1 - waiting / exchanging));
    report_prediction(double(training_.built.tokens_per_step) / tokens_per_second);
    if (device_)  // what is beyond the plan is the libraries' own
      fmt::print("device memory: planned {}, taken {}\n", bytes_text(training_.arena_bytes[int(Tier::device)]),
                 bytes_text(free_before_ - device_->free_bytes()));
    const MemoryPlan& plan = training_.memory;
    for (Tier tier : {Tier::device, Tier::host}) {
      if (plan[tier].total_bytes() == 0 || device_) continue;  // a device's arenas are allocated whole
      Ledger resident{};
      for (const Tensor& tensor : storage_->persistent_tensors())
        if (tensor.home == tier)
          resident[int(tensor.role)] +=
              resident_bytes(static_cast<std::byte*>(storage_->persistent(tensor.name)), tensor.bytes());
      fmt::print("{:<18}{:>14}{:>14}\n", std::string(name_of(tier)) + " memory", "planned", "measured");
      for (int r = 0; r < kRoles; ++r)
        if (plan[tier].at_peak[r] > 0)
          fmt::print("{:<18}{:>14}{:>14}\n", name_of(Role(r)), bytes_text(plan[tier].at_peak[r]),
                     resident[r] > 0 ? bytes_text(resident[r]) : "");
      fmt::print("{:<18}{:>14}{:>14}\n", "all transient",
                 bytes_text(training_.arena_bytes[int(tier)] - plan[tier].persistent_bytes),
                 bytes_text(resident_bytes(storage_->transient(tier),
                                           storage_->bytes(tier) - storage_->persistent_bytes(tier))));
      fmt::print("{:<18}{:>14}{:>14}\n", "arena", bytes_text(training_.arena_bytes[int(tier)]),
                 bytes_text(resident_bytes(storage_->base(tier), storage_->bytes(tier))));
    }
    if (training_.snapshot_bytes > 0)
      fmt::print("{:<18}{:>14}\n", "saving behind", bytes_text(training_.snapshot_bytes));
    if (const int64_t stored = plan[Tier::nvme].total_bytes(); stored > 0)
      fmt::print("{:<18}{:>14}\n", "on NVMe", bytes_text(stored));
    fmt::print("{:<18}{:>14}{:>14}\n", "process, peak", "", bytes_text(peak_resident_bytes()));
  }

  void report_prediction(double seconds) const {
    const Prediction& predicted = *training_.prediction;
    const auto row = [](const char* name, double planned, double measured) {
      fmt::print("{:<18}{:>14.3f}{:>14.3f}\n", name, planned, measured);
    };
    fmt::print("{:<18}{:>14}{:>14}\n", "a step, seconds", "predicted", "measured");
    row("in all", predicted.seconds, seconds);
    const auto measured = [&](const std::function<double(const Stalls&)>& figure) {
      std::vector<double> all;
      for (const Stalls& stalls : stalls_) all.push_back(figure(stalls));
      return median_of(all);
    };
    if (!stalls_.empty()) {
      row("waiting for NVMe", predicted.stalls.storage(), measured(&Stalls::storage));
      row("waiting for copies", predicted.stalls.copies(), measured(&Stalls::copies));
      if (predicted.stalls.host() > 0) row("waiting for host", predicted.stalls.host(), measured(&Stalls::host));
      if (world_.size() > 1) row("waiting for ranks", predicted.stalls.ranks(), measured(&Stalls::ranks));
      row("running again", predicted.stalls.restoring, measured([](const Stalls& stalls) { return stalls.restoring; }));
    }
    if (const std::string assumed = assumed_text(training_.rates); !assumed.empty()) fmt::print("{}\n", assumed);
  }

  Session& session_;
  std::string trace_;  // file for a trace of the last step; empty: none
  const std::atomic<bool>* stop_;
  std::optional<AtomicFile> trace_file_;
  std::vector<Stalls> stalls_;
  std::vector<double> exchanges_, waits_;
  std::unique_ptr<World> alone_;
  World& world_;
  bool stopping_ = false;
  std::string unsaved_;  // what went wrong with the last save
  Threads threads_;
  PlannedProgram training_;
  const DType compute_dtype_ = strata::compute_dtype(training_.program());
  const bool may_stall_ = strata::may_stall(training_.program());
  std::optional<PlannedProgram> validation_;
  std::unique_ptr<Device> device_;
  Groups groups_;
  int64_t free_before_ = 0;  // bytes of the device, before anything is allocated there
  std::optional<Storage> storage_;
  std::optional<TokenDataset> dataset_, validation_set_;
  std::optional<Sampler> sampler_, validation_sampler_;
  std::optional<Executor> executor_, evaluator_;
  std::optional<Feed> feed_, validation_feed_;
  std::optional<RunDirectory> directory_;  // of rank 0; outlives what saves there
  std::optional<Saver> saver_;
  std::optional<StepLog> log_;
  Progress progress_;
  StepLog::Fields extra_;
  int64_t step_ = 0, samples_ = 0;
  double loss_ = NAN;
};

}  // namespace

TrainSummary train(Session& session, const TrainOptions& options) { return Loop(session, options).run(); }

}  // namespace strata
