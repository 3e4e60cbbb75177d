// Pipelines planned as a job: for any number of stages, chunks and microbatches what the stages send and receive fits
// together and comes to an end, even where a send waits for its receiver.
#include <random>

#include "engine/runtime/job.h"
#include "tests/harness.h"

namespace strata::pipeline_plans_test {
namespace {

struct Drawn {
  const char* schedule;
  int chunks;
};
constexpr Drawn kSchedules[] = {
    {"gpipe", 1},       {"1f1b", 1},        {"zero_bubble_h1", 1}, {"zero_bubble_h2", 1}, {"interleaved", 1},
    {"interleaved", 2}, {"interleaved", 4}, {"breadth_first", 2},  {"breadth_first", 4},  {"zero_bubble_v", 2},
    {"auto", 1},        {"auto", 2},        {"interleaved", 3},    {"breadth_first", 1}};

std::string toml(const std::string& schedule, int stages, int chunks, int layers, int microbatches,
                 const std::string& more = "") {
  return "[run]\nreproducible = true\n[model]\nplugin = \"gpt\"\nlayers = " + std::to_string(layers) +
         "\nhidden = 12\nheads = 3\nvocabulary = 17\ncontext = 5\ntied = false\n[data]\ntrain = [\"none\"]\n"
         "sequence_length = 5\nglobal_batch = " +
         std::to_string(microbatches) +
         "\nmicro_batch = 1\n[device]\nthreads = 1\n[mesh]\npipeline = " + std::to_string(stages) +
         "\n[plugins.adamw]\n[plugins.clip]\n[plugins.pipeline]\nschedule = \"" + schedule +
         "\"\nchunks = " + std::to_string(chunks) + "\n" + more;
}

std::vector<RunPlans> planned(const std::string& config) {
  const test::TemporaryFolder folder;
  Session session(test::write_file(folder / "config.toml", config), {});
  session.rates = Rates();
  return plan_stages(session);
}

TEST(PipelinePlans, StagesAgreeWhateverTheSchedule) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int i = 0; i < 60; ++i) {
    const auto [schedule, chunks] = kSchedules[size_t(i) % std::size(kSchedules)];
    const int stages = 2 + int(random() % 4), layers = stages * chunks + int(random() % 4),
              microbatches = 1 + int(random() % 12);
    const char* more[] = {"", "[plugins.recompute]\n", "[plugins.gist]\n"};
    SCOPED_TRACE(std::string(schedule) + ", stages " + std::to_string(stages) + ", chunks " + std::to_string(chunks) +
                 ", layers " + std::to_string(layers) + ", microbatches " + std::to_string(microbatches));
    EXPECT_NO_THROW(planned(toml(schedule, stages, chunks, layers, microbatches, more[random() % 3])));
  }
}

}  // namespace
}  // namespace strata::pipeline_plans_test
