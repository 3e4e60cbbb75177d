// Training with tensors on NVMe as a user has it: resuming, full budgets in small, and what goes wrong with the disk.
#include <sys/stat.h>

#include <array>
#include <atomic>
#include <cmath>
#include <fstream>
#include <random>

#include "engine/checkpoint/store.h"
#include "engine/data/token_file.h"
#include "engine/planning/rates.h"
#include "engine/runtime/trainer.h"
#include "strata/json.h"
#include "tests/harness.h"
#include "tests/random_cases.h"

namespace strata::offload_test {
namespace {

class Offload : public testing::Test {
 protected:
  void SetUp() override {
    TokenFileWriter writer(folder_ / "t.bin", false);
    std::vector<int32_t> tokens(900);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = int32_t(i * i % 61);
    writer.append(tokens);
    writer.commit();
    mkdir((folder_ / "disk").c_str(), 0755);
    test::write_file(folder_ / "config.toml",
                     "[run]\nsteps = 4\ncheckpoint_every = 2\n[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = "
                     "64\nheads = 2\nvocabulary = 64\ncontext = 16\n[data]\ntrain = [\"" +
                         (folder_ / "t.bin") + "\"]\nvalidation = [\"" + (folder_ / "t.bin") +
                         "\"]\nsequence_length = 16\nglobal_batch = 4\nmicro_batch = 2\n[plugins.adamw]\n");
  }
  std::vector<std::string> nvme() const {
    return {"plugins.offload.directory=\"" + (folder_ / "disk") + "\"",
            "plugins.offload.optimizer=nvme",
            "plugins.offload.parameters=nvme",
            "plugins.offload.gradients=nvme",
            "plugins.offload.activations=nvme",
            "plugins.offload.minimum=0",
            "plugins.recompute.every=2"};
  }
  Session session(const std::string& run, std::vector<std::string> sets, std::vector<std::string> more = {}) const {
    sets.push_back("run.directory=\"" + (folder_ / run) + "\"");
    sets.insert(sets.end(), more.begin(), more.end());
    return Session(folder_ / "config.toml", sets);
  }
  // The loss of every step, and the last validation loss.
  std::vector<double> log(const std::string& run) const {
    std::ifstream file(folder_ / (run + "/log.jsonl"));
    std::vector<double> losses;
    double validation = 0;
    for (std::string line; std::getline(file, line);) {
      const Json entry = Json::parse(line, "log");
      losses.push_back(entry.find("loss")->number("loss"));
      if (const Json* loss = entry.find("validation_loss")) validation = loss->number("validation_loss");
    }
    losses.push_back(validation);
    return losses;
  }
  std::string error_of(const std::vector<std::string>& sets) const {
    try {
      Session one = session("failing", sets);
      train(one, {});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage) << error.what();
      return error.what();
    }
    return "no error";
  }
  // The same over folders of their own on several disks, which here are one.
  std::vector<std::string> over(const std::vector<std::string>& names) const {
    std::string list;
    for (const std::string& name : names) {
      mkdir((folder_ / name).c_str(), 0755);
      list += (list.empty() ? "\"" : ", \"") + (folder_ / name) + "\"";
    }
    auto sets = nvme();
    sets[0] = "plugins.offload.directory=[" + list + "]";
    return sets;
  }
  test::TemporaryFolder folder_;
};

// What rests where is no part of a checkpoint: saved without offload it resumes with it, and the other way round.
TEST_F(Offload, CheckpointsFitAnyPlacement) {
  Session plain = session("plain", {});
  train(plain, {});
  for (bool offload_first : {true, false}) {
    const std::string run = offload_first ? "first" : "second";
    Session start = session(run, offload_first ? nvme() : std::vector<std::string>{}, {"run.steps=2"});
    train(start, {});
    Session rest = session(run, offload_first ? std::vector<std::string>{} : nvme());
    train(rest, {.resume = true, .trace = ""});
    EXPECT_EQ(log(run), log("plain"));
    const Checkpoint a(*CheckpointStore(folder_ / "plain", 2).latest()), b(*CheckpointStore(folder_ / run, 2).latest());
    ASSERT_EQ(a.tensors().size(), b.tensors().size());
    for (const auto& [name, entry] : a.tensors())
      EXPECT_EQ(entry.pieces[0].checksum, b.tensors().at(name).pieces[0].checksum) << name;
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "disk") ||
              !std::filesystem::exists(folder_ / "disk/strata-nvme.data"));
}

// The shape of configs/gpt2-xl-24gib.toml in small: states and parameters far beyond both budgets.
TEST_F(Offload, LargerThanBothBudgets) {
  std::vector<std::string> sets = {"plugins.offload.directory=\"" + (folder_ / "disk") + "\"",
                                   "plugins.offload.optimizer=nvme",
                                   "plugins.offload.parameters=nvme",
                                   "plugins.offload.gradients=host",
                                   "plugins.offload.activations=host",
                                   "plugins.offload.minimum=4KiB",
                                   "plugins.recompute.mode=budget",
                                   "model.layers=12",
                                   "data.micro_batch=4"};
  Session plain = session("plain", {"model.layers=12", "data.micro_batch=4"});
  const int64_t all = plain.plan(Goal::train).memory.device().total_bytes();
  train(plain, {});
  sets.push_back("device.memory=" + std::to_string(all / 10));
  sets.push_back("host.memory=" + std::to_string(all / 5));
  Session small = session("small", sets);
  const MemoryPlan plan = small.plan(Goal::train).memory;
  // Device and host are one memory here: both budgets bound the sum.
  EXPECT_LE(plan.device().total_bytes(), all / 10 + all / 5);
  EXPECT_EQ(plan[Tier::host].total_bytes(), 0);
  EXPECT_GT(plan.device().persistent_bytes, 0);  // memory fills first, the rest goes on
  EXPECT_GT(plan[Tier::nvme].persistent_bytes, all / 4);
  train(small, {});
  EXPECT_EQ(log("small"), log("plain"));
}

// A block that is made again reads its parameters once for that and for its gradients.
TEST_F(Offload, ParametersAreReadOnceAPass) {
  for (const char* mode : {"none", "blocks"}) {
    std::vector<std::string> sets{"plugins.offload.directory=\"" + (folder_ / "disk") + "\"",
                                  "plugins.offload.parameters=nvme", "plugins.offload.minimum=0",
                                  "plugins.offload.order=microbatch", "model.layers=4"};
    if (mode != std::string("none")) sets.push_back("plugins.recompute.enabled=true");
    const PlannedProgram planned = session("reads", sets).plan(Goal::train);
    const Program& program = planned.program();
    std::map<std::string, int> reads;
    for (const Op& op : program.ops)
      if (op.stream == Stream::read)
        for (TensorId id : op.inputs) ++reads[program[program.whole(id)].name];
    for (const auto& [name, count] : reads)
      if (name.starts_with("block.") && !name.starts_with("block.3.") && program[program.find(name)].bytes() > 4096)
        EXPECT_EQ(count, 2 * 2) << name << ", recompute " << mode;  // two passes, two microbatches
  }
}

TEST_F(Offload, FixedFractionsSplitThreeWays) {
  auto sets = nvme();
  sets.insert(sets.end(), {"plugins.offload.device_fraction=0.3", "plugins.offload.host_fraction=0.5",
                           "plugins.offload.parameters=device"});
  const PlannedProgram planned = session("x", sets).plan(Goal::train);
  std::array<double, kTiers> bytes{};
  double all = 0;
  for (TensorId id : planned.program().with_role(Role::optimizer_state)) {
    bytes[int(planned.program()[id].home)] += double(planned.program()[id].bytes());
    all += double(planned.program()[id].bytes());
  }
  const double largest = 2.0 * 4 * 64 * 256 / all;   // whole tensors only
  EXPECT_NEAR(bytes[0] / all, 0.3 + 0.35, largest);  // the device's share and the host's are in one memory
  EXPECT_EQ(bytes[1], 0);
  EXPECT_NEAR(bytes[2] / all, 0.35, largest);
}

// On one memory offload to the host changes nothing, and to NVMe it never takes more than without; nothing is copied.
TEST_F(Offload, OneMemoryIsNeverLarger) {
  const Session without = session("x", {});
  const PlannedProgram plain = without.plan(Goal::train);  // with what a disk asks of addresses, and without
  const int64_t bytes = plain.memory.device().total_bytes(),
                aligned =
                    plan_memory(plain.program(), "cpu", without.threads(), kStorageAlignment).device().total_bytes();
  for (const char* what : {"optimizer", "parameters", "gradients", "activations"}) {
    const std::string key = std::string("plugins.offload.") + what;
    const std::vector<std::string> base = {"plugins.offload.directory=\"" + (folder_ / "disk") + "\"",
                                           "plugins.offload.minimum=4KiB"};
    auto host = base, nvme = base;
    host.push_back(key + "=host");
    nvme.push_back(key + "=nvme");
    for (const auto& sets : {host, nvme}) {
      const PlannedProgram planned = session("x", sets).plan(Goal::train);
      EXPECT_LE(planned.memory.device().total_bytes(), sets == nvme ? aligned : bytes) << what;
      EXPECT_EQ(planned.memory[Tier::host].total_bytes(), 0) << what;
      for (const Op& op : planned.program().ops)
        EXPECT_TRUE(op.stream != Stream::to_device && op.stream != Stream::to_host) << what;
    }
    EXPECT_EQ(session("x", host).plan(Goal::train).program().ops.size(), plain.program().ops.size()) << what;
  }
}

// Without a budget everything on NVMe takes at most half of the plain run's memory; both in one arena. However fast the
// disk is and every kernel beside it, which decides when moves begin.
TEST_F(Offload, EverythingOnNvmeTakesHalf) {
  const std::vector<std::string> deep = {"model.layers=24", "model.hidden=64", "model.vocabulary=64"};
  auto sets = nvme();
  sets.insert(sets.end(), deep.begin(), deep.end());
  Session without = session("x", deep), everything = session("x", sets);
  without.rates = everything.rates = Rates();
  const int64_t plain = without.plan(Goal::train).memory.device().total_bytes();
  const Program program = everything.plan(Goal::train).program();
  for (uint64_t seed = test::first_seed(), end = seed + uint64_t(test::cases(40)); seed < end; ++seed) {
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed));
    test::Random random(seed);
    const auto factor = [&] { return std::pow(10.0, std::uniform_real_distribution<>(-4, 4)(random)); };
    Rates rates;
    rates.read *= factor(), rates.write *= factor(), rates.flops *= factor(), rates.memory *= factor();
    for (const Op& op : program.ops) {
      const OpView view(program, op);
      const Cost cost = cost_of(view);
      if (op.stream == Stream::compute && !rates.kernels.contains(kernel_name(view)))
        rates.kernels[kernel_name(view)] = {{cost.flops, cost.bytes, 1e-5 * factor()}};
    }
    everything.rates = rates;
    EXPECT_LE(everything.plan(Goal::train).memory.device().total_bytes(), plain / 2);
  }
}

TEST_F(Offload, WrongDirectoriesAreRefused) {
  auto sets = nvme();
  sets[0] = "plugins.offload.directory=\"" + (folder_ / "nothere") + "\"";
  EXPECT_NE(error_of(sets).find(folder_ / "nothere"), std::string::npos);
  sets[0] = "plugins.offload.directory=\"" + (folder_ / "t.bin") + "\"";
  EXPECT_NE(error_of(sets).find(folder_ / "t.bin"), std::string::npos);
  EXPECT_NE(error_of({"plugins.offload.activations=nvme"}).find("plugins.offload.directory is not set"),
            std::string::npos);
  sets = nvme();
  sets.push_back("plugins.offload.space=64KiB");
  EXPECT_NE(error_of(sets).find("nvme memory, but the space for the NVMe tier allows 64.00 KiB"), std::string::npos)
      << error_of(sets);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "failing"));  // nothing was written
}

// Losses and checkpoints do not know over how many disks bytes spread, nor how; nothing is left on any.
TEST_F(Offload, SeveralDisksGiveTheSameLosses) {
  Session plain = session("plain", {});
  train(plain, {});
  Session start = session("run", over({"a", "b", "c"}), {"run.steps=2"});
  start.rates = Rates{.disks = {{1, 1}, {1e9, 1e9}, {3e9, 3e9}}};  // of which the first is too slow for any
  std::array<std::atomic<int>, 3> requests{};
  start.storage_faults.request = [&](size_t file, int64_t) { return ++requests[file], 0; };
  train(start, {});
  EXPECT_EQ(requests[0], 0);
  EXPECT_GT(requests[1], 0);
  EXPECT_GT(requests[2], 0);
  Session rest = session("run", over({"d", "b"}));
  train(rest, {.resume = true, .trace = ""});
  EXPECT_EQ(log("run"), log("plain"));
  const Checkpoint a(*CheckpointStore(folder_ / "plain", 2).latest()), b(*CheckpointStore(folder_ / "run", 2).latest());
  for (const auto& [name, entry] : a.tensors())
    EXPECT_EQ(entry.pieces[0].checksum, b.tensors().at(name).pieces[0].checksum) << name;
  for (const char* name : {"a", "b", "c", "d"}) EXPECT_TRUE(std::filesystem::is_empty(folder_ / name)) << name;
}

// Bytes go by bandwidth, and plan, prediction, report and store agree on them.
TEST_F(Offload, DisksGetBytesByBandwidth) {
  Session two = session("x", over({"fast", "slow"}));
  two.rates = Rates{.disks = {{3e9, 3e9}, {1e9, 1e9}}};
  const RunPlans plans = two.plan_run();
  const MemoryPlan& memory = plans.main().memory;
  ASSERT_TRUE(memory.stripes);
  EXPECT_DOUBLE_EQ(memory.stripes->share(0), 0.75);
  const int64_t bytes = plans.main().arena_bytes[int(Tier::nvme)];
  const Json json = Json::parse(plan_json(plans), "plan");
  const Json::Array& disks = json.find("disks")->array("disks");
  ASSERT_EQ(disks.size(), 2u);
  int64_t sum = 0;
  for (size_t d = 0; d < 2; ++d) {
    EXPECT_EQ(disks[d].find("directory")->string("directory"), folder_ / (d ? "slow" : "fast"));
    EXPECT_EQ(disks[d].find("bytes")->integer("bytes"), memory.stripes->bytes_of(d, bytes));
    sum += disks[d].find("bytes")->integer("bytes");
  }
  EXPECT_EQ(sum, bytes);
  EXPECT_NE(plan_text(plans).find(folder_ / "slow: reads 1.00 GB/s, writes 1.00 GB/s, 25.0% of the bytes"),
            std::string::npos)
      << plan_text(plans);
  // Measured: both are one disk, which is no faster for being named twice.
  std::optional<Rates> of_one, of_two;
  {
    const PlannedProgram one = session("x", over({"fast"})).plan(Goal::train);
    of_one = one.rates;
    of_two = session("x", over({"fast", "slow"})).plan(Goal::train).rates;
  }
  ASSERT_EQ(of_two->disks.size(), 2u);
  EXPECT_TRUE(of_two->disks[0].shared && of_two->disks[1].shared);
  EXPECT_FALSE(of_one->disks[0].shared);
  // Half of it each; a second measurement may have been better.
  EXPECT_GE(of_two->disks[0].read, of_one->disks[0].read / 2);
  EXPECT_NEAR(of_two->read, of_two->disks[0].read * 2, 1e-6 * of_two->read);
  const PlannedProgram planned = session("x", over({"fast", "slow"})).plan(Goal::train);
  const Storage storage(planned.program(), planned.memory);
  EXPECT_NE(storage.note().find(" are on one disk: together they are no faster than one of them."), std::string::npos)
      << storage.note();
}

TEST_F(Offload, OneWrongDiskOfSeveralIsNamed) {
  auto sets = over({"a", "b"});
  sets[0] = "plugins.offload.directory=[\"" + (folder_ / "a") + "\", \"" + (folder_ / "nothere") + "\"]";
  EXPECT_EQ(error_of(sets).find("the NVMe directory " + (folder_ / "nothere") + ": No such file"), 0u)
      << error_of(sets);
  std::filesystem::create_directory_symlink(folder_ / "a", folder_ / "same");
  sets[0] = "plugins.offload.directory=[\"" + (folder_ / "a") + "\", \"" + (folder_ / "same") + "\"]";
  EXPECT_NE(error_of(sets).find("directory: \"" + (folder_ / "a") + "\" and \"" + (folder_ / "same") +
                                "\" are one folder; name each disk once."),
            std::string::npos)
      << error_of(sets);
  sets[0] = "plugins.offload.directory=[\"" + (folder_ / "a") + "\", \"\"]";
  EXPECT_NE(error_of(sets).find("directory: one of the names is empty"), std::string::npos) << error_of(sets);
  {
    const PlannedProgram other = session("x", over({"b"})).plan(Goal::train);
    const Storage storage(other.program(), other.memory);
    EXPECT_EQ(error_of(over({"a", "b"})).find("the NVMe directory " + (folder_ / "b") + " is in use by another run"),
              0u);
  }
  EXPECT_FALSE(std::filesystem::exists(folder_ / "failing"));  // nothing was written
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "a"));
}

// One of two disks fails in the middle of a run.
TEST_F(Offload, AFailingDiskOfSeveralIsNamed) {
  Session good = session("run", over({"a", "b"}), {"run.steps=2"});
  train(good, {});
  const std::string checkpoint = *CheckpointStore(folder_ / "run", 2).latest();
  Session bad = session("run", over({"a", "b"}));
  std::atomic<int> requests{0};
  bad.storage_faults.request = [&](size_t file, int64_t) { return ++requests > 150 && file == 1 ? -EIO : 0; };
  try {
    train(bad, {.resume = true, .trace = ""});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::failed);
    EXPECT_NE(std::string(error.what()).find("the NVMe directory " + (folder_ / "b") + ": cannot "), std::string::npos)
        << error.what();
    EXPECT_NE(std::string(error.what()).find(" tensor \""), std::string::npos) << error.what();
  }
  EXPECT_EQ(*CheckpointStore(folder_ / "run", 2).latest(), checkpoint);
}

TEST_F(Offload, TwoRunsDoNotShareADirectory) {
  const Session first = session("one", nvme());
  const PlannedProgram planned = first.plan(Goal::train);
  const Storage storage(planned.program(), planned.memory);
  EXPECT_NE(error_of(nvme()).find("use"), std::string::npos) << error_of(nvme());
}

// An I/O error stops the run with the tensor's name; the last checkpoint stays.
TEST_F(Offload, DiskErrorsStopTheRun) {
  Session good = session("run", nvme(), {"run.steps=2"});
  train(good, {});
  const std::string checkpoint = *CheckpointStore(folder_ / "run", 2).latest();
  Session bad = session("run", nvme());
  std::atomic<int> requests{0};
  bad.storage_faults.request = [&](size_t, int64_t) { return ++requests > 150 ? -EIO : 0; };
  try {
    train(bad, {.resume = true, .trace = ""});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::failed);
    EXPECT_NE(std::string(error.what()).find("tensor \""), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("Input/output error"), std::string::npos) << error.what();
  }
  EXPECT_EQ(*CheckpointStore(folder_ / "run", 2).latest(), checkpoint);
  EXPECT_EQ(Checkpoint(checkpoint).info().step, 2);
}

// Short reads and writes, no io_uring and no direct I/O change nothing but speed.
TEST_F(Offload, PoorDisksGiveTheSameLosses) {
  Session plain = session("plain", {});
  train(plain, {});
  for (int fault = 0; fault < 3; ++fault) {
    const std::string run = "run" + std::to_string(fault);
    Session poor = session(run, nvme());
    if (fault == 0) poor.storage_faults.request = [](size_t, int64_t offset) { return offset % 3 ? 0 : 4096; };
    if (fault == 1) poor.storage_faults.no_ring = true;
    if (fault == 2) poor.storage_faults.no_direct = true;
    train(poor, {});
    EXPECT_EQ(log(run), log("plain")) << fault;
  }
}

}  // namespace
}  // namespace strata::offload_test
