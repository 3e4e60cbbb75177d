// Measuring steps, here or in a child process; see measure.h.
#include "engine/runtime/measure.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>

#include "engine/data/token_file.h"
#include "engine/runtime/feed.h"
#include "engine/runtime/usage.h"

namespace strata {
namespace {

// Hooks of plugins see a step loop without checkpoints.
class Loop final : public StepContext {
 public:
  Loop(const Session& session, const PlannedProgram& planned)
      : session_(session),
        program_(planned.program()),
        rates_(planned.rates),
        threads_(session.threads(), session.cut()),
        device_(open_device(session.device.backend, int(session.device.index))),
        storage_(program_, planned.memory, {}, {}, device_.get()),
        executor_(program_, planned.memory, storage_, session.device.backend, threads_,
                  std::max(1, int(session.host.threads))),
        feed_(executor_, session.batch(Goal::train)),
        vocabulary_(planned.built.vocabulary) {
    storage_.initialize(uint64_t(session.run.seed), threads_);
    if (!session.device.graphs) executor_.without_graphs();
    try {
      data_.emplace(session.data.train, vocabulary_);
      sampler_.emplace(*data_, session.data.sequence_length, session.data.shuffle, uint64_t(session.run.seed));
    } catch (const Error&) {  // no data on this machine: random tokens
      sampler_.reset();
    }
  }

  Measurement run(int64_t count) {
    Measurement result;
    std::vector<double> seconds;
    for (step_ = 1; step_ <= count; ++step_) {
      const auto began = std::chrono::steady_clock::now();
      set_scalar(kStepScalar, double(step_));
      set_scalar(kSeedScalar, double(session_.run.seed));
      set_scalar(kLearningRateFactor, 1);
      for (const NamedPlugin& named : session_.plugins) named.plugin->step_start(*this);
      if (sampler_)
        feed_.fill(*sampler_, (step_ - 1) * session_.data.global_batch);
      else
        feed_.fill_random(vocabulary_, uint64_t(step_));
      if (device_ && step_ == count) executor_.trace();  // events around each op cost time there
      executor_.run();
      result.losses.push_back(feed_.loss());
      for (const NamedPlugin& named : session_.plugins) named.plugin->step_end(*this);
      if (count == 1 || (step_ > 1 && !(device_ && count > 2 && step_ == count)))
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
    }
    std::sort(seconds.begin(), seconds.end());
    result.seconds = seconds[seconds.size() / 2];
    result.steps = seconds;
    result.stalls = executor_.stalls();
    result.spans = executor_.spans();
    learn_rates(session_.rates_wanted(program_), program_, result.spans, rates_);
    result.device_resident = storage_.device()
                                 ? storage_.bytes(Tier::device)
                                 : resident_bytes(storage_.base(Tier::device), storage_.bytes(Tier::device));
    result.host_resident = storage_.device() ? storage_.bytes(Tier::host)
                                             : resident_bytes(storage_.base(Tier::host), storage_.bytes(Tier::host));
    result.process_peak = peak_resident_bytes();
    return result;
  }

  int64_t step() const override { return step_; }
  int64_t steps() const override { return session_.run.steps; }
  double scalar(std::string_view name) const override {
    const TensorId id = program_.find(name);
    if (!id) throw Error("no scalar is named \"" + std::string(name) + "\" in this program.");
    return read_scalar(program_, id, executor_.pointer(id));
  }
  void set_scalar(std::string_view name, double value) override { storage_.set_scalar(name, value); }
  void log(std::string_view, double) override {}

 private:
  const Session& session_;
  const Program& program_;
  const Rates& rates_;
  Threads threads_;
  std::unique_ptr<Device> device_;
  Storage storage_;
  Executor executor_;
  Feed feed_;
  std::optional<TokenDataset> data_;
  std::optional<Sampler> sampler_;
  int64_t vocabulary_, step_ = 0;
};

// A measurement through a file between two processes of one program: plain bytes.
class Wire {
 public:
  Wire() : file_(std::tmpfile()) {
    if (!file_) throw Error("cannot make a temporary file for a measurement.", ExitCode::failed);
  }
  ~Wire() { std::fclose(file_); }
  void send(const Measurement& m) {
    put(m.losses), put(m.spans), put(std::vector<char>(m.error.begin(), m.error.end()));
    put(std::vector<Stalls>{m.stalls});
    put(std::vector<double>{m.seconds});
    put(m.steps);
    put(std::vector<int64_t>{m.device_resident, m.host_resident, m.process_peak});
    std::fflush(file_);
  }
  Measurement receive() {
    std::rewind(file_);
    Measurement m;
    std::vector<char> error;
    std::vector<Stalls> stalls;
    std::vector<double> seconds;
    std::vector<int64_t> bytes;
    if (!get(m.losses) || !get(m.spans) || !get(error) || !get(stalls) || !get(seconds) || !get(m.steps) ||
        !get(bytes)) {
      m = {};
      m.error = "the measuring process ended early";
      return m;
    }
    m.error.assign(error.begin(), error.end());
    m.stalls = stalls[0];
    m.seconds = seconds[0];
    m.device_resident = bytes[0], m.host_resident = bytes[1], m.process_peak = bytes[2];
    return m;
  }

 private:
  template <class T>
  void put(const std::vector<T>& values) {
    const size_t count = values.size();
    std::fwrite(&count, sizeof count, 1, file_);
    if (count > 0) std::fwrite(values.data(), sizeof(T), count, file_);
  }
  template <class T>
  bool get(std::vector<T>& values) {
    size_t count = 0;
    if (std::fread(&count, sizeof count, 1, file_) != 1) return false;
    values.resize(count);
    return count == 0 || std::fread(values.data(), sizeof(T), count, file_) == count;
  }
  std::FILE* file_;
};

}  // namespace

Measurement measure(const Session& session, const PlannedProgram& planned, int64_t steps) {
  return Loop(session, planned).run(steps);
}

Measurement measure_apart(const Session& session, const PlannedProgram& planned, int64_t steps) {
  Wire wire;
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) throw Error("cannot start a process for a measurement.", ExitCode::failed);
  if (child == 0) {
    Measurement result;
    try {
      result = measure(session, planned, steps);
    } catch (const std::exception& error) {
      result.error = error.what();
    }
    wire.send(result);
    _exit(0);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return wire.receive();
}

}  // namespace strata
