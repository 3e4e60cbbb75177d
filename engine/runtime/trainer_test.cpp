// The step loop through the engine's own interface: hooks in order, notes in checkpoints, a plugin built into the
// program.
#include <atomic>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "engine/checkpoint/store.h"
#include "engine/data/token_file.h"
#include "engine/runtime/trainer.h"
#include "tests/harness.h"

namespace strata::trainer_test {
namespace {

std::vector<std::string> calls;
std::atomic<bool> stop{false};  // what a signal would ask for

// Writes down every call it gets.
class Recorder final : public Plugin {
 public:
  void options(Options& o) override {
    o.add("fail_at", fail_at_, "step whose end hook throws; 0: none").non_negative();
    o.add("stop_at", stop_at_, "step whose start asks the run to stop; 0: none").non_negative();
  }
  void step_start(StepContext& c) override {
    if (c.step() == stop_at_) stop = true;
    calls.push_back("step " + std::to_string(c.step()) + " of " + std::to_string(c.steps()));
  }
  void part_start(StepContext&, StepPart part) override { calls.push_back("+" + std::string(name_of(part))); }
  void part_end(StepContext&, StepPart part) override { calls.push_back("-" + std::string(name_of(part))); }
  void step_end(StepContext& c) override {
    if (c.step() == fail_at_) throw std::runtime_error("as asked");
    c.log("twice_the_step", 2.0 * double(c.step()));
    calls.push_back("end");
  }
  void save(CheckpointNotes& notes) override { notes.put("calls", std::to_string(calls.size())); }
  void restore(const CheckpointNotes& notes) override {
    calls.push_back("restored " + notes.get("calls").value_or("nothing"));
  }

 private:
  int64_t fail_at_ = 0, stop_at_ = 0;
};
STRATA_PLUGIN(Recorder, "recorder", "1", "writes down its calls")

class Training : public testing::Test {
 protected:
  void SetUp() override {
    calls.clear();
    stop = false;
    TokenFileWriter writer(folder_ / "t.bin", false);
    std::vector<int32_t> tokens(600);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = int32_t(i * i % 61);
    writer.append(tokens);
    writer.commit();
    write_config();
  }
  void write_config() {
    test::write_file(
        folder_ / "config.toml",
        "[run]\nsteps = 2\ndirectory = \"" + (folder_ / "run") +
            "\"\n[model]\nplugin = \"gpt\"\nlayers = 1\nhidden = 16\nheads = 2\n[data]\ntrain = [\"" +
            (folder_ / "t.bin") +
            "\"]\nsequence_length = 16\nglobal_batch = 2\nmicro_batch = 1\n[plugins.adamw]\n[plugins.recorder]\n");
  }
  Session session(std::vector<std::string> sets = {}) { return Session(folder_ / "config.toml", sets); }
  test::TemporaryFolder folder_;
};

TEST_F(Training, HooksComeInOrder) {
  Session first = session();
  train(first, {.resume = false, .trace = ""});
  // One step: forward and backward of two microbatches, updates as their gradients arrive.
  const std::vector<std::string> step = {"+load",     "-load",   "+forward", "+backward", "-forward", "+update",
                                         "-backward", "-update", "+publish", "-publish",  "end"};
  std::vector<std::string> want = {"step 1 of 2"};
  want.insert(want.end(), step.begin(), step.end());
  want.push_back("step 2 of 2");
  want.insert(want.end(), step.begin(), step.end());
  EXPECT_EQ(calls, want);
  std::ifstream log(folder_ / "run/log.jsonl");
  std::string line;
  std::getline(log, line);
  EXPECT_NE(line.find("\"twice_the_step\": 2"), std::string::npos) << line;

  const size_t saved = calls.size();
  Session second = session({"run.steps=3"});
  train(second, {.resume = true, .trace = ""});
  EXPECT_EQ(calls[saved], "restored " + std::to_string(saved));
  EXPECT_EQ(calls[saved + 1], "step 3 of 3");
}

TEST_F(Training, HookThatThrowsIsNamed) {
  Session failing = session({"plugins.recorder.fail_at=2"});
  try {
    train(failing, {.resume = false, .trace = ""});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "plugin \"recorder\", step_end, step 2: as asked");
    EXPECT_EQ(error.code(), ExitCode::failed);
  }
}

TEST_F(Training, StopsAfterTheStepAndResumes) {
  Session calm = session({"run.steps=5", "run.directory=" + (folder_ / "calm")});
  train(calm, {});
  Session stopped = session({"run.steps=5", "plugins.recorder.stop_at=3"});
  const TrainSummary first = train(stopped, {.stop = &stop});
  EXPECT_TRUE(first.interrupted);
  EXPECT_EQ(first.steps, 3);
  EXPECT_EQ(first.made, 3);
  EXPECT_EQ(first.unsaved, "");
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/step-00000003"));
  stop = false;
  Session rest = session({"run.steps=5"});
  const TrainSummary second = train(rest, {.resume = true, .stop = &stop});
  EXPECT_FALSE(second.interrupted);
  EXPECT_EQ(second.made, 2);
  const auto bytes = [](const std::string& path) {
    std::ostringstream all;
    all << std::ifstream(path, std::ios::binary).rdbuf();
    return all.str();
  };
  EXPECT_TRUE(bytes(folder_ / "run/step-00000005/tensors-00000.safetensors") ==
              bytes(folder_ / "calm/step-00000005/tensors-00000.safetensors"));
}

TEST_F(Training, AskedInTheLastStepItIsDone) {
  Session session = Training::session({"plugins.recorder.stop_at=2"});
  const TrainSummary summary = train(session, {.stop = &stop});
  EXPECT_FALSE(summary.interrupted);
  EXPECT_EQ(summary.steps, 2);
}

TEST_F(Training, AskedBeforeTheFirstStepNothingIsWritten) {
  stop = true;
  Session session = Training::session();
  const TrainSummary summary = train(session, {.stop = &stop});
  EXPECT_TRUE(summary.interrupted);
  EXPECT_EQ(summary.made, 0);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
}

}  // namespace
}  // namespace strata::trainer_test
