// Steps on ranks that are threads; see outcome.h.
#include "engine/verify/outcome.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <new>
#include <optional>

#include "engine/data/sampler.h"
#include "engine/data/token_file.h"
#include "engine/runtime/additions.h"
#include "engine/runtime/assembly.h"
#include "engine/runtime/feed.h"
#include "engine/runtime/ranks.h"
#include "engine/runtime/step_runner.h"
#include "engine/runtime/usage.h"
#include "strata/layout.h"
#include "strata/random.h"

namespace strata::verifying {
namespace {

// Whole tensors, filled by all ranks.
class Collection {
 public:
  void add(const Tensor& tensor, const std::vector<std::byte>& part) {
    const std::lock_guard lock(mutex_);
    const auto [found, is_new] = places_.try_emplace(tensor.name, tensors_.size());
    if (is_new) {
      const Shape shape = tensor.full_shape();
      const size_t bytes = size_t(elements(shape) * size_of(tensor.dtype));
      tensors_.push_back({tensor.name, tensor.dtype, shape, std::vector<std::byte>(bytes)});
      written_.emplace_back(size_t(elements(shape)));
    }
    Whole& whole = tensors_[found->second];
    std::vector<bool>& written = written_[found->second];
    const int64_t unit = size_of(tensor.dtype);
    GlobalIndex(tensor).runs(0, elements(tensor.shape), [&](int64_t local, int64_t global, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        std::byte* to = whole.bytes.data() + (global + i) * unit;
        const std::byte* from = part.data() + (local + i) * unit;
        if (written[size_t(global + i)] && std::memcmp(to, from, size_t(unit)) != 0) whole.agrees = false;
        std::memcpy(to, from, size_t(unit));
        written[size_t(global + i)] = true;
      }
    });
  }
  std::vector<Whole> take() {
    for (Whole& whole : tensors_) whole.digest = XXH3_64bits(whole.bytes.data(), whole.bytes.size());
    return std::move(tensors_);
  }

 private:
  std::mutex mutex_;
  std::vector<Whole> tensors_;
  std::vector<std::vector<bool>> written_;  // by tensor and element
  std::map<std::string, size_t> places_;
};

// Sequences of which each token makes the next one likely, so that a few steps of training show in the loss. A function
// of the step and of where in the step's batch a microbatch is, whoever has it.
void put_made_up(const Feed& feed, const BatchShape& batch, int64_t first_microbatch, int64_t vocabulary,
                 int64_t step) {
  const int64_t length = batch.sequence_length;
  std::vector<int32_t> tokens(size_t(batch.micro_batch * length)), targets(tokens.size());
  for (int64_t m = 0; m < batch.microbatches; ++m) {
    for (int64_t b = 0; b < batch.micro_batch; ++b) {
      const int64_t sequence = (first_microbatch + m) * batch.micro_batch + b;
      const auto drawn = [&](int64_t i) {
        return int64_t(random_block(uint64_t(step), stream_of("sequence"), uint64_t(sequence * (length + 1) + i))[0]);
      };
      int64_t token = drawn(length) % vocabulary;
      for (int64_t i = 0; i < length; ++i) {
        tokens[size_t(b * length + i)] = int32_t(token);
        token = (token * 5 + 1 + drawn(i) % 3) % vocabulary;
        targets[size_t(b * length + i)] = int32_t(token);
      }
    }
    feed.put(size_t(m), tokens.data(), targets.data());
  }
}

// Bytes that the system says it could give; 0 where it does not say.
int64_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;)
    if (int64_t kib = 0; word == "MemAvailable:" && file >> kib) return kib << 10;
  return 0;
}

// What is too large is refused before it is touched: all ranks' arenas, and two copies of all that is compared.
void require_room(const RunPlans& plans, const Session& session) {
  if (is_asynchronous(session.device.backend)) return;
  const PlannedProgram& main = plans.main();
  int64_t bytes = 0;
  for (const Tier tier : {Tier::device, Tier::host}) bytes += main.arena_bytes[size_t(tier)] * session.mesh.size();
  for (const Tensor& tensor : main.program().tensors)
    if (tensor.persistent) bytes += 2 * elements(tensor.full_shape()) * size_of(tensor.dtype);
  if (const int64_t available = available_bytes(); available > 0 && bytes > available)
    throw Error("it needs " + bytes_text(bytes) + " of memory, and " + bytes_text(available) + " are free.");
}

// One rank.
class Rank {
 public:
  Rank(const Setup& setup, const std::vector<std::string>& sets, World* world, Device* device)
      : session_(setup.config, sets, world),
        alone_(single_world()),
        world_(world ? *world : *alone_),
        assembly_(session_, world_, plans(session_, world_), device),
        steps_(session_, assembly_) {
    for (size_t p = 0; p < assembly_.plans.phases.programs(); ++p)
      feeds_.emplace_back(assembly_.executor_of(p), session_.batch(Goal::train));
    assembly_.storage.initialize(uint64_t(session_.run.seed), assembly_.threads);
    begin_with_additions(session_.plugins, session_.model(), assembly_.storage);
    try {
      dataset_.emplace(session_.data.train, assembly_.plans.main().built.vocabulary);
      sampler_.emplace(*dataset_, session_.data.sequence_length, session_.data.shuffle, uint64_t(session_.run.seed));
    } catch (const Error&) {  // not on this machine: made up, which whoever calls says
      sampler_.reset();
    }
  }

  void disturb(double by, uint64_t which) {
    Storage& storage = assembly_.storage;
    for (const Tensor& tensor : storage.persistent_tensors()) {
      if (tensor.role != Role::parameter || tensor.dtype != DType::f32) continue;
      const std::vector<std::byte> bytes = storage.copy(tensor);
      const auto* values = reinterpret_cast<const float*>(bytes.data());
      storage.fill(tensor, [&](void* memory, int64_t first, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
          const auto drawn = random_block(which, stream_of(std::string(tensor.name)), uint64_t(first + i));
          static_cast<float*>(memory)[i] = float(double(values[first + i]) * (1 + (drawn[0] % 2 ? by : -by)));
        }
      });
    }
  }

  // `last`: nothing goes on behind it. Between the others steps overlap as in training.
  double step(int64_t step, bool last) {
    double loss = 0;
    const BatchShape batch = session_.batch(Goal::train);
    const int64_t first = session_.mesh["data"].coordinate * batch.microbatches;
    const auto feed = [&]() -> const Feed& { return feeds_[steps_.program()]; };
    steps_.run(
        step,
        [&] {
          if (sampler_)
            feed().fill(*sampler_, (step - 1) * session_.data.global_batch + first * batch.micro_batch);
          else
            put_made_up(feed(), batch, first, assembly_.plans.main().built.vocabulary, step);
        },
        [&] {
          std::vector<double> losses = feed().losses();
          if (session_.mesh.programs().size > 1) losses.resize(size_t(batch.microbatches), 0.0);
          if (!session_.mesh.counts()) std::fill(losses.begin(), losses.end(), 0.0);
          loss = sum_over_ranks(assembly_.groups, std::move(losses));
        },
        last ? StepMode::whole : StepMode::in_loop);
    return loss;
  }

  void collect(Collection& into) {
    for (const Tensor& tensor : assembly_.storage.persistent_tensors())
      if (tensor.role == Role::parameter || tensor.role == Role::optimizer_state)
        into.add(tensor, assembly_.storage.copy(tensor));
  }

  void measure(Outcome& outcome) const {
    outcome.has_data = sampler_.has_value();
    for (const Tier tier : {Tier::device, Tier::host}) {
      outcome.planned_bytes += assembly_.plans.main().arena_bytes[size_t(tier)];
      const Storage& storage = assembly_.storage;
      outcome.measured_bytes +=
          assembly_.device ? storage.bytes(tier) : resident_bytes(storage.base(tier), storage.bytes(tier));
    }
  }

 private:
  static RunPlans plans(Session& session, const World& world) {
    session.data.validation.clear();
    session.rates = Rates{};  // nothing here depends on how fast this machine is
    RunPlans plans = session.plan_run();
    require_room(plans, session);
    make_own(plans, session, world);
    return plans;
  }

  Session session_;
  std::unique_ptr<World> alone_;
  World& world_;
  Assembly assembly_;
  StepRunner steps_;
  std::vector<Feed> feeds_;  // by program
  std::optional<TokenDataset> dataset_;
  std::optional<Sampler> sampler_;
};

}  // namespace

const Whole* Outcome::find(const std::string& name) const {
  const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const Whole& t) { return t.name == name; });
  return found == tensors.end() ? nullptr : &*found;
}

void Outcome::drop_bytes() {
  for (Whole& whole : tensors) std::vector<std::byte>().swap(whole.bytes);
}

Outcome run(const Setup& setup, const std::vector<std::string>& more, int64_t steps, double disturbance,
            uint64_t which) {
  constexpr double kSilence = 60;  // seconds that a rank waits for another
  Outcome outcome;
  std::vector<std::string> sets = setup.sets;
  sets.insert(sets.end(), more.begin(), more.end());
  try {
    std::string backend;
    {
      const Session session(setup.config, sets);
      outcome.ranks = session.mesh.size();
      backend = session.device.backend;
    }
    Collection collection;
    const auto one = [&](World* world, int number) {
      const std::unique_ptr<Device> device = setup.device ? setup.device(backend, number) : nullptr;
      Rank rank(setup, sets, world, device.get());
      if (disturbance > 0) rank.disturb(disturbance, which);
      for (int64_t step = 1; step <= steps; ++step) {
        const double loss = rank.step(step, step == steps);
        if (number == 0) outcome.losses.push_back(loss);
      }
      rank.collect(collection);
      if (number == 0) rank.measure(outcome);
    };
    if (outcome.ranks == 1)
      one(nullptr, 0);
    else
      run_local(
          outcome.ranks, [&](World& world) { one(&world, world.rank()); }, kSilence);
    outcome.tensors = collection.take();
  } catch (const Error& error) {
    outcome.end = error.code() == ExitCode::usage ? Outcome::End::refused : Outcome::End::failed;
    outcome.reason = error.what();
  } catch (const std::bad_alloc&) {
    outcome.end = Outcome::End::failed;
    outcome.reason = "out of memory";
  } catch (const std::exception& error) {
    outcome.end = Outcome::End::failed;
    outcome.reason = error.what();
  }
  return outcome;
}

}  // namespace strata::verifying
