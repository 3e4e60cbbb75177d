// Runs that stop and are resumed behind every step, against one that never stopped: for tests of what a step leaves to
// the next one.
#pragma once
#include <fstream>
#include <map>
#include <sstream>

#include "engine/data/token_file.h"
#include "engine/runtime/trainer.h"
#include "tests/harness.h"

namespace strata::test {

class ResumedRuns : public testing::Test {
 protected:
  static constexpr int kVocabulary = 61;

  void SetUp() override {
    TokenFileWriter writer(tokens(), false);
    std::vector<int32_t> tokens(900);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = int32_t(i * i % kVocabulary);
    writer.append(tokens);
    writer.commit();
  }
  std::string tokens() const { return folder_ / "t.bin"; }

  // `config` trained for `steps` steps on so many ranks, resumed behind each step up to `last`: the checkpoint at the
  // end has the files of a run in one go. `more`: further settings.
  void expect_resumes(const std::string& config, int ranks, int steps, int last,
                      const std::vector<std::string>& more = {}) const {
    const std::string path = write_file(folder_ / "config.toml", config), calm = "calm" + std::to_string(ranks);
    train_to(path, ranks, calm, steps, false, more);
    EXPECT_EQ(files(calm, steps).size(), size_t(ranks));
    for (int at = 1; at <= last; ++at) {
      if (left_out(size_t(at))) continue;
      SCOPED_TRACE(std::to_string(ranks) + " ranks, resumed after step " + std::to_string(at));
      const std::string run = "run" + std::to_string(ranks) + std::to_string(at);
      train_to(path, ranks, run, at, false, more);
      train_to(path, ranks, run, steps, true, more);
      EXPECT_TRUE(files(run, steps) == files(calm, steps));
    }
  }

  void train_to(const std::string& config, int ranks, const std::string& run, int steps, bool resume,
                const std::vector<std::string>& more) const {
    std::vector<std::string> sets{"run.steps=" + std::to_string(steps), "run.directory=\"" + (folder_ / run) + "\"",
                                  "data.train=[\"" + tokens() + "\"]"};
    sets.insert(sets.end(), more.begin(), more.end());
    run_local(
        ranks,
        [&](World& world) {
          Session session(config, sets, ranks > 1 ? &world : nullptr);
          train(session, {.resume = resume, .trace = ""});
        },
        120);
  }
  // Of the checkpoint of a step, those that hold tensors, by name.
  std::map<std::string, std::string> files(const std::string& run, int step) const {
    char name[32];
    std::snprintf(name, sizeof name, "/step-%08d", step);
    std::map<std::string, std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / run + name))
      if (entry.path().extension() == ".safetensors") {
        std::ostringstream all;
        all << std::ifstream(entry.path(), std::ios::binary).rdbuf();
        found[entry.path().filename()] = all.str();
      }
    return found;
  }

  std::string path_of(const std::string& name) const { return folder_ / name; }

 private:
  TemporaryFolder folder_;
};

}  // namespace strata::test
