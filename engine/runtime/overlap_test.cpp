// Steps that overlap: what is left of one goes on behind the beginning of the next, bit for bit as if it did not.
#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "engine/planning/residency.h"
#include "engine/runtime/executor.h"
#include "strata/builder.h"
#include "tests/backends.h"
#include "tests/harness.h"
#include "tests/ordering.h"
#if defined(STRATA_EMULATED_CUDA)
#include "cuda/emulated/machine.h"
#endif

namespace strata::overlap_test {
namespace {

uint32_t first_seed() {
  const char* given = std::getenv("STRATA_SEED");
  return given ? uint32_t(std::atoll(given)) : std::random_device{}();
}

std::atomic<int> begun{0}, copied{0};  // steps that have begun; copies of test_follow made
std::atomic<int> put{0};               // ops of test_put put into a queue
std::atomic<bool> fails{false};
bool emulated = false;  // a device, whose queues go on only while somebody asks for them

// What a kernel does, as one of the CPU and as one of a device's queues.
std::map<std::string, Kernel, std::less<>> kernels_of(const std::function<void(const Binding&)>& work) {
  return {
    {"cpu", {[work](const Binding& b) -> Launch { return [work, b] { work(b); }; }}},
#if defined(STRATA_EMULATED_CUDA)
        {"cuda", {[work](const Binding& b) -> Launch {
           return [work, b] {
             if (b.op().kind->name == "test_put") put.fetch_add(1), put.notify_all();
             cuda::enqueue(b.queue(), [work, b] { work(b); });
           };
         }}},
#endif
  };
}

// All hand on their input. test_begin says that a step has begun; test_follow ends when the step after its own has,
// and throws if it is to fail; test_lag lets others go first; test_await_put ends when test_put of the step after its
// own is in its queue. reduce_for_test hands on its first element.
void register_kinds() {
  static bool done = false;
  if (std::exchange(done, true)) return;
  const auto kind = [](const char* name, void (*act)()) {
    register_kind({.name = name,
                   .summary = "",
                   .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                     return {{v.input(0).shape, v.input(0).dtype}};
                   },
                   .kernels = kernels_of([act](const Binding& b) {
                     act();
                     std::memcpy(b.out<float>(0), b.in<float>(0), size_t(b.input(0).bytes()));
                   })});
  };
  kind("test_begin", [] { begun.fetch_add(1), begun.notify_all(); });
  kind("test_follow", [] {
    const int own = copied.fetch_add(1) + 1;
    for (int now; (now = begun) <= own;) emulated ? void(test::gpu()->idle()) : begun.wait(now);
    if (fails) throw Error("as asked");
  });
  kind("test_lag", [] { std::this_thread::yield(); });
  kind("test_put", [] {});
  kind("test_await_put", [] {
    const int own = copied.fetch_add(1) + 1;
    for (int now; (now = put) <= own;) put.wait(now);
  });
  register_kind({.name = "reduce_for_test",
                 .summary = "",
                 .shape = [](const OpView& v) -> std::vector<TensorSpec> {
                   return {{{1}, v.input(0).dtype}};
                 },
                 .kernels = kernels_of([](const Binding& b) { *b.out<float>(0) = *b.in<float>(0); })});
}

// A step whose update on the stream `host` cannot end before the next step has begun: sum += factor * x. On a device
// all but that is in its queues. `late`: the copy for the update is looked at after the next step has begun.
struct Following {
  explicit Following(const std::string& backend = "cpu", bool late = false) {
    register_kinds();
    begun = copied = put = 0, fails = false;
    const bool device = emulated = is_asynchronous(backend);
    Builder build(program);
    const Shape shape{64};
    x = build.data("x", shape, DType::f32);
    const TensorId factor = build.scalar("factor");
    sum = build.parameter("sum", shape, {});
    first = build.emit("test_begin", {x}, {}, "first");
    const TensorId value = build.emit("reduce_for_test", {first}, {}, "value");
    program[first].step_output = program[value].step_output = true;
    TensorId y = build.emit(late ? "test_put" : "test_lag", {x}, {}, "y");
    build.step_part = StepPart::update;
    const auto on_host = [&](TensorId id) {
      if (device) program[id].home = Tier::host;
      return id;
    };
    build.stream = Stream::to_host;
    if (device) y = on_host(build.emit("move", {y}, {}, "y there"));
    build.stream = Stream::host;
    const TensorId z =
        on_host(late ? build.emit("test_await_put", {sum}, {}, "z") : build.emit("test_follow", {y}, {}, "z"));
    const TensorId scaled = on_host(build.emit("scale", {late ? y : z, factor}, {}, "scaled"));
    build.emit_all("add", {on_host(sum), scaled}, {}, {sum});
    plan = plan_memory(program, backend, 1);
    storage.emplace(program, plan, std::vector<const MemoryPlan*>{}, NvmeStore::Faults{}, test::device_of(backend));
    storage->initialize(1, threads);
    executor.emplace(program, plan, *storage, backend, threads, 1, nullptr, 60);
  }
  // Of a step with x = `value` everywhere.
  void step(float value, double factor) {
    storage->set_scalar("factor", factor);
    std::fill_n(static_cast<float*>(executor->pointer(x)), 64, value);
    executor->run({}, true);
  }
  void end() {
    ++begun, begun.notify_all();
    ++put, put.notify_all();
    executor->drain();
  }
  float result() {
    const std::vector<std::byte> bytes = storage->copy(program[sum]);
    return *reinterpret_cast<const float*>(bytes.data());
  }
  Program program;
  MemoryPlan plan;
  Threads threads{1};
  std::optional<Storage> storage;
  std::optional<Executor> executor;
  TensorId x, sum, first;
};

// With a barrier between steps the first would never end. Each step's update takes its own step's number, though the
// host has set the next one's by then.
TEST(Overlap, WhatIsLeftGoesOnBehindTheNextStep) {
  for (const std::string& backend : test::kBackends) {
    Following steps(backend);
    float expected = 0;
    for (int step = 1; step <= 8; ++step) {
      steps.step(0.25f * float(step), step);
      EXPECT_EQ(*static_cast<const float*>(steps.executor->pointer(steps.first)), 0.25f * float(step));
      expected += 0.25f * float(step * step);
    }
    EXPECT_EQ(steps.storage->holder(), &*steps.executor);
    steps.end();
    EXPECT_EQ(steps.storage->holder(), nullptr);
    EXPECT_EQ(steps.result(), expected);
  }
}

// A step that fails leaves the one before whole, and makes no update; the executor can go on after it.
TEST(Overlap, AStepThatFailsLeavesTheOneBeforeWhole) {
  Following steps;
  steps.step(0.5f, 1);
  steps.step(0.75f, 2);
  const float expected = 0.5f + 0.75f * 2;
  EXPECT_THROW(steps.step(NAN, 3), NonFinite);
  EXPECT_EQ(steps.result(), expected);
  EXPECT_EQ(steps.executor->first_non_finite(), "first");
  begun = copied.load();  // as nothing of the step had been
  steps.step(1.5f, 4);
  steps.end();
  EXPECT_EQ(steps.result(), expected + 1.5f * 4);
}

#if defined(STRATA_EMULATED_CUDA)
// A copy that is still in its queue when the next step begins takes what its own step made, in whatever order queues
// are served.
TEST(Overlap, ACopyThatIsLeftTakesItsOwnStep) {
  Following steps("cuda", true);
  double expected = 0;
  for (int step = 1; step <= 200; ++step) {
    steps.step(float(step), 1);
    expected += step;
  }
  steps.end();
  EXPECT_EQ(steps.result(), expected);
}

// On a device nothing looks at numbers within a step: one that is not finite is found when compute is over, and the
// step runs to its end, so that no state is half updated.
TEST(Overlap, WhatIsNotFiniteOnADeviceEndsAWholeStep) {
  Following steps("cuda");
  steps.step(0.5f, 1);
  begun += 10, begun.notify_all();
  EXPECT_THROW(steps.step(NAN, 2), NonFinite);
  EXPECT_EQ(steps.storage->holder(), nullptr);
  EXPECT_TRUE(std::isnan(steps.result()));
}

// When ops ran, of a step that began behind another and of that one; what is left of it waits for nobody.
TEST(Overlap, SpansOfADeviceGoAcrossTheEdge) {
  Following steps("cuda");
  steps.step(0.5f, 1);
  ++begun, begun.notify_all();
  steps.executor->trace();
  EXPECT_EQ(steps.storage->holder(), nullptr);
  --begun;
  for (int step = 2; step <= 4; ++step) steps.step(0.5f, step);
  const std::vector<Span> before = steps.executor->spans_before();
  ASSERT_EQ(before.size(), steps.program.ops.size());
  EXPECT_GT(before.back().finish, steps.executor->spans().front().start);  // the update, behind this step's beginning
  for (const Span& span : before) EXPECT_GE(span.finish, span.start);
  EXPECT_LT(before.front().finish, 0);
  steps.end();
  double at = 0;
  for (const Span& span : steps.executor->spans()) {  // here each op waits for the one before
    EXPECT_GE(span.start, at);
    EXPECT_GE(span.finish, span.start);
    at = span.start;
  }
}
#endif

// What fails behind the next step's beginning ends that step, with the op's name; also when no step comes any more.
TEST(Overlap, WhatFailsBehindTheNextStepIsTold) {
  for (size_t n = 0; n < 2 * test::kBackends.size(); ++n) {
    const bool another = n % 2;
    Following steps(test::kBackends[n / 2]);
    steps.step(0.5f, 1);
    fails = true;
    std::string text;
    try {
      if (another) steps.step(0.75f, 2);
      steps.end();
      FAIL();
    } catch (const Error& error) {
      text = error.what();
    }
    EXPECT_NE(text.find("(test_follow): as asked"), std::string::npos) << text;
    EXPECT_EQ(steps.result(), 0);
  }
}

TEST(Overlap, AnExecutorThatIsGivenUpEndsItsLastStep) {
  for (const std::string& backend : test::kBackends) {
    Following steps(backend);
    steps.step(0.5f, 1);
    ++begun, begun.notify_all();
    steps.executor.reset();
    EXPECT_EQ(steps.storage->holder(), nullptr);
    EXPECT_EQ(steps.result(), 0.5f);
  }
}

// Ops on streams by chance: reads, changes in place, numbers that the host sets, results that it reads.
struct Scattered {
  Scattered(uint32_t seed, bool scattered) {
    register_kinds();
    std::mt19937 random(seed), streams(seed + 1);
    Builder build(program);
    const Shape shape{int64_t(1 + random() % 300)};
    std::vector<TensorId> known{build.data("x", shape, DType::f32), build.data("y", shape, DType::f32)};
    const TensorId factor = build.scalar("factor");
    std::vector<TensorId> lasting;
    for (int p = 0; p < 4; ++p)
      lasting.push_back(build.parameter("p" + std::to_string(p), shape, {Initializer::Kind::normal, 0.3}));
    const int count = 20 + int(random() % 60);
    for (int i = 0; i < count; ++i) {
      const Stream drawn = Stream(streams() % kStreams);  // compute every second time
      build.stream = scattered && streams() % 2 ? drawn : Stream::compute;
      build.step_part = i < count / 2 ? StepPart::forward : StepPart::update;
      const auto any = [&] { return random() % 3 ? known[random() % known.size()] : lasting[random() % 4]; };
      const TensorId a = any(), b = any();
      if (i >= count / 2 && random() % 3 == 0) {
        const TensorId p = lasting[random() % 4];
        if (a != p) build.emit_all("add", {p, a}, {}, {p});
        continue;
      }
      switch (random() % 4) {
        case 0:
          known.push_back(build.emit("scale", {a, factor}));
          break;
        case 1:
          known.push_back(build.emit("test_lag", {a}));
          break;
        default:
          known.push_back(a == b ? build.emit("gelu", {a}) : build.emit("add", {a, b}));
      }
      if (known.size() > 6) known.erase(known.begin() + 2);
      if (random() % 15 == 0) program[known.back()].step_output = true;
    }
    program.one_memory = true;
  }

  // Step outputs of every step, and what lasts after those of `looks`.
  std::vector<std::vector<float>> run(int steps, const std::vector<bool>& looks, bool overlap) {
    const MemoryPlan plan = plan_memory(program, "cpu", 2);
    if (overlap) test::expect_ordered(program, plan);
    Threads threads(2);
    Storage storage(program, plan);
    storage.initialize(3, threads);
    std::memset(storage.transient(Tier::device), 0xFF, size_t(plan.device().transient_bytes));
    Executor executor(program, plan, storage, "cpu", threads);
    std::vector<std::vector<float>> all;
    const auto take = [&](const void* from, TensorId id) {
      const auto* values = static_cast<const float*>(from);
      all.emplace_back(values, values + elements(program[id].shape));
    };
    for (int step = 0; step < steps; ++step) {
      storage.set_scalar("factor", 0.5 + 0.1 * step);
      for (int32_t t = 0; t < 2; ++t)
        for (int64_t i = 0; i < elements(program[{t}].shape); ++i)
          static_cast<float*>(executor.pointer({t}))[i] = 0.01f * float((i + step * 7 + t) % 97) - 0.3f;
      executor.run({}, overlap);
      for (int32_t t = 0; t < int32_t(program.tensors.size()); ++t)
        if (program[{t}].step_output) take(executor.pointer({t}), {t});
      if (!looks[size_t(step)]) continue;
      executor.drain();
      for (int32_t t = 0; t < int32_t(program.tensors.size()); ++t)
        if (program[{t}].role == Role::parameter) take(storage.copy(program[{t}]).data(), {t});
      if (overlap) std::memset(storage.transient(Tier::device), 0xFF, size_t(plan.device().transient_bytes));
    }
    executor.drain();
    return all;
  }
  Program program;
};

TEST(Overlap, AnyAssignmentToStreamsGivesTheSameBits) {
  const uint32_t base = first_seed();
  for (uint32_t seed = base; seed < base + 120; ++seed) {
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed));
    constexpr int kSteps = 7;
    std::mt19937 random(seed + 2);
    std::vector<bool> looks;
    for (int step = 0; step < kSteps; ++step) looks.push_back(random() % 3 == 0 || step + 1 == kSteps);
    const auto expected = Scattered(seed, false).run(kSteps, looks, false);
    const auto actual = Scattered(seed, true).run(kSteps, looks, true);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i)
      ASSERT_EQ(std::memcmp(actual[i].data(), expected[i].data(), actual[i].size() * 4), 0) << i;
  }
}

}  // namespace
}  // namespace strata::overlap_test
