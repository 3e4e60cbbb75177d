// Measuring steps, here or in a child process; see measure.h.
#include "engine/runtime/measure.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>

#include "engine/runtime/assembly.h"
#include "engine/runtime/feed.h"
#include "engine/runtime/run_data.h"
#include "engine/runtime/step_runner.h"
#include "engine/runtime/usage.h"

namespace strata {
namespace {

// Steps without checkpoints, on this rank alone.
class Loop {
 public:
  Loop(const Session& session, const RunPlans& plans)
      : session_(session),
        world_(single_world()),
        assembly_(session, *world_, own(session, *world_, plans)),
        steps_(session, assembly_) {
    for (const auto& executor : assembly_.executors) feeds_.emplace_back(*executor, session.batch(Goal::train));
    assembly_.storage.initialize(uint64_t(session.run.seed), assembly_.threads);
    try {
      data_.emplace(session, Goal::train, vocabulary());
    } catch (const Error&) {  // no data on this machine: random tokens
      data_.reset();
    }
  }

  Measurement run(int64_t count) {
    Measurement result;
    std::vector<double> seconds;
    for (int64_t step = 1; step <= count; ++step) {
      const auto began = std::chrono::steady_clock::now();
      // Events around each op cost time on a device; what goes on behind the last step is looked into with it.
      Executor& executor = assembly_.executor_of(assembly_.plans.of_step(step));
      const bool traced =
          assembly_.device && (step == count || (step + 1 == count && count > 3 && executor.overlaps()));
      if (traced) executor.trace();
      steps_.run(
          step, [&] { feed(step); }, [&] { result.losses.push_back(feeds_[steps_.program()].loss()); },
          step < count ? StepMode::in_loop : StepMode::whole);
      if (count == 1 || (step > 1 && !(traced && count > 2)))
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
    }
    std::sort(seconds.begin(), seconds.end());
    result.seconds = seconds[seconds.size() / 2];
    result.steps = seconds;
    result.stalls = steps_.executor().stalls();
    result.spans = steps_.executor().spans();
    const PlannedProgram& planned = assembly_.plans.programs[steps_.program()];
    learn_rates(session_.rates_wanted(planned.program()), session_.known_rates(), planned.program(), result.spans,
                planned.rates);
    result.device_resident = resident(Tier::device);
    result.host_resident = resident(Tier::host);
    result.process_peak = peak_resident_bytes();
    return result;
  }

 private:
  static RunPlans own(const Session& session, const World& world, RunPlans plans) {
    plans.programs.resize(plans.phases.programs());  // no validation
    make_own(plans, session, world);
    return plans;
  }
  int64_t vocabulary() const { return assembly_.plans.main().built.vocabulary; }
  void feed(int64_t step) {
    Feed& feed = feeds_[steps_.program()];
    if (data_)
      data_->load((step - 1) * session_.data.global_batch, feed, steps_);
    else
      feed.fill_random(vocabulary(), uint64_t(step));
  }
  int64_t resident(Tier tier) const {
    const Storage& storage = assembly_.storage;
    return assembly_.device ? storage.bytes(tier) : resident_bytes(storage.base(tier), storage.bytes(tier));
  }

  const Session& session_;
  std::unique_ptr<World> world_;
  Assembly assembly_;
  StepRunner steps_;
  std::vector<Feed> feeds_;  // by program
  std::optional<RunData> data_;
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

Measurement measure(const Session& session, const RunPlans& plans, int64_t steps) {
  return Loop(session, plans).run(steps);
}

Measurement measure_apart(const Session& session, const RunPlans& plans, int64_t steps) {
  Wire wire;
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) throw Error("cannot start a process for a measurement.", ExitCode::failed);
  if (child == 0) {
    Measurement result;
    try {
      result = measure(session, plans, steps);
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
