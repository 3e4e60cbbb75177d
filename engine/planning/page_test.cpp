// The memory page: figures it shows are the plan's, it is one well-formed file, and nothing in it comes from elsewhere.
#include "engine/planning/page.h"

#include <set>

#include "engine/planning/page_drawing.h"
#include "engine/planning/predict.h"

#include "tests/backends.h"
#include "tests/harness.h"

namespace strata::page_test {
namespace {

// Every tag closed in order; void elements of HTML aside.
void expect_well_formed(const std::string& page) {
  std::vector<std::string> open;
  for (size_t at = page.find('<'); at != std::string::npos; at = page.find('<', at + 1)) {
    const size_t end = page.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = page.substr(at + 1, page.find_first_of(" >", at + 1) - at - 1);
    if (tag == "!doctype" || tag == "meta" || page[end - 1] == '/') continue;
    if (tag[0] != '/') {
      open.push_back(tag);
    } else {
      ASSERT_FALSE(open.empty());
      ASSERT_EQ(open.back(), tag.substr(1)) << page.substr(at, 80);
      open.pop_back();
    }
  }
  EXPECT_TRUE(open.empty());
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(Page, ShowsThePlans) {
  const std::string model =
      "[model]\nplugin = \"gpt\"\nlayers = 3\nhidden = 32\nheads = 4\nvocabulary = 64\ncontext = 16\n"
      "[data]\ntrain = [\"none\"]\nsequence_length = 16\nglobal_batch = 4\nmicro_batch = 2\n[plugins.adamw]\n";
  const test::Runner plain(model), resting(model + "[plugins.offload]\nminimum = 0\noptimizer = \"host\"\n");
  std::vector<PageRun> runs;
  for (const test::Runner* runner : {&plain, &resting}) {
    const Prediction prediction = predict(runner->built.program, runner->plan, Rates());
    runs.push_back({.name = runner == &plain ? "plain" : "states <away> & \"far\"",
                    .program = &runner->built.program,
                    .memory = &runner->plan,
                    .spans = prediction.spans,
                    .stalls = prediction.stalls,
                    .seconds = prediction.seconds});
  }
  const std::string page = memory_page("a & b", "nowhere", runs);
  expect_well_formed(page);
  EXPECT_NE(page.find("<h1>Memory of a &amp; b</h1>"), std::string::npos);
  EXPECT_NE(page.find("states &lt;away&gt; &amp; &quot;far&quot;"), std::string::npos);
  EXPECT_EQ(count(page, "<h3>Memory over the step"), 2u);
  EXPECT_EQ(count(page, "Host memory over the step"), 0u);  // on a CPU it is the device's
  EXPECT_EQ(count(page, "What ran when"), 2u);
  for (const test::Runner* runner : {&plain, &resting}) {
    const TierPlan& device = runner->plan.device();
    EXPECT_GE(count(page, "<td>" + bytes_text(device.total_bytes()) + "</td>"), 1u);
    EXPECT_GE(count(page, "peak " + bytes_text(device.persistent_bytes + device.live_peak_bytes) + " at "), 1u);
  }
  for (const char* elsewhere : {"http", "<script", "src=", "url(", "@import"})
    EXPECT_EQ(count(page, elsewhere), 0u) << elsewhere;

  // What a reader looks for: the largest tensors, both key and mark of a budget, and every colour with a meaning.
  EXPECT_EQ(count(page, "Largest at the peak"), 2u);
  EXPECT_GE(
      count(page, held_at(*runs[0].program, *runs[0].memory, Tier::device, runs[0].memory->device().peak_op)[0].name),
      1u);
  EXPECT_EQ(count(page, "class=\"budget\""), 0u);
  runs[0].budgets[int(Tier::device)] = runs[0].memory->device().total_bytes() / 2;
  const std::string limited = memory_page("x", "y", runs);
  expect_well_formed(limited);
  EXPECT_EQ(count(limited, "class=\"budget\""), 3u);  // against time, in the bars, over the step
  EXPECT_GE(count(limited, "budget (a line)"), 1u);
  for (size_t at = limited.find("fill=\"#"); at != std::string::npos; at = limited.find("fill=\"#", at + 1))
    EXPECT_GE(count(limited, "background:" + limited.substr(at + 6, 7)), 1u) << limited.substr(at, 60);

  const std::string picture = memory_picture("a & b", runs);
  expect_well_formed(picture);
  EXPECT_EQ(picture.rfind("<svg xmlns=", 0), 0u);
  EXPECT_NE(picture.find("states &lt;away&gt;"), std::string::npos);
  EXPECT_GE(count(picture, "<path"), 3u);

  const std::string one = memory_page("x", "y", {&runs[1], 1});  // nothing to compare with: no table
  expect_well_formed(one);
  EXPECT_EQ(count(one, "At a glance"), 0u);
}

#ifdef STRATA_EMULATED_CUDA
// Beside a device the host has memory of its own.
TEST(Page, ShowsTheHostsMemory) {
  const test::Runner resting(
      "[model]\nplugin = \"gpt\"\nlayers = 3\nhidden = 32\nheads = 4\nvocabulary = 64\ncontext = 16\n[data]\n"
      "train = [\"none\"]\nsequence_length = 16\nglobal_batch = 4\nmicro_batch = 2\n[plugins.adamw]\n"
      "[plugins.offload]\nminimum = 0\noptimizer = \"host\"\n",
      {}, Goal::train, {}, nullptr, "cuda", test::gpu());
  const Prediction prediction = predict(resting.built.program, resting.plan, Rates());
  const PageRun run{.name = "away",
                    .program = &resting.built.program,
                    .memory = &resting.plan,
                    .spans = prediction.spans,
                    .stalls = prediction.stalls,
                    .seconds = prediction.seconds};
  const std::string page = memory_page("x", "y", {&run, 1});
  expect_well_formed(page);
  EXPECT_EQ(count(page, "Device memory over the step"), 1u);
  EXPECT_EQ(count(page, "Host memory over the step"), 1u);
  EXPECT_EQ(count(page, "Largest at the peak"), 2u);
}
#endif

TEST(Page, OneColourHasOneMeaning) {
  std::set<std::string_view> colours(std::begin(page::kRoleColors), std::end(page::kRoleColors));
  for (std::string_view colour :
       {page::kForward, page::kBackward, page::kUpdate, page::kAgain, page::kMove, page::kStall, page::kLost})
    EXPECT_TRUE(colours.insert(colour).second) << colour;
}

TEST(Page, TicksAreRound) {
  EXPECT_EQ(page::tick_bytes(page::round_bytes(2.15 * (1 << 30), 5)), "512 MiB");
  EXPECT_EQ(page::tick_bytes(3.0 * (512 << 20)), "1.5 GiB");
  EXPECT_EQ(page::tick_bytes(0), "0");
  EXPECT_EQ(page::tick_bytes(page::round_bytes(1000, 5)), "256 B");
  EXPECT_EQ(page::tick_seconds(page::round_step(1.6, 8)), "0.2 s");
  EXPECT_EQ(page::tick_seconds(page::round_step(0.055, 8)), "10 ms");
  EXPECT_EQ(page::tick_seconds(page::round_step(8.1, 8)), "2 s");
  EXPECT_EQ(page::tick_seconds(5e-5), "50 µs");
  for (double all : {1e-9, 3.3e-4, 0.7, 12.0, 4e5})
    for (int most : {1, 3, 8}) {
      EXPECT_LE(all / page::round_step(all, most), most);
      EXPECT_GT(5.1 * all / page::round_step(all, most), most);
    }
}

// Plans whose memory and time are made up.
struct Made {
  Program program{};
  std::vector<MemoryPlan> plans;
  std::vector<PageRun> runs;
  explicit Made(std::vector<std::tuple<const char*, int64_t, double>> list) : plans(list.size()) {
    for (size_t i = 0; i < list.size(); ++i) {
      const auto& [name, bytes, seconds] = list[i];
      plans[i][Tier::device].persistent_bytes = bytes;
      runs.push_back({.name = name, .program = &program, .memory = &plans[i], .seconds = seconds});
    }
  }
};

TEST(Page, SaysWhatFollows) {
  Made made({{"plain", 100 << 20, 1.0}, {"cheap", 80 << 20, 1.05}, {"small", 25 << 20, 3.0}, {"poor", 85 << 20, 2.0}});
  made.runs[0].budgets[0] = 90 << 20;
  const std::vector<std::string> expected = {
      "Least memory: small, 25.00 MiB of device memory, 25% of what plain takes, for 3.00 × its time.",
      "Least memory in at most 1.1 × the time: cheap, 80.00 MiB of device memory, 80% of what plain takes, for 1.05 × "
      "its "
      "time.",
      "Here another is at least as small and as fast as: poor.", "In the budget of 90.00 MiB fit: cheap, small, poor."};
  EXPECT_EQ(conclusions(made.runs), expected);
  Made none({{"plain", 100, 1.0}, {"larger", 200, 1.0}});
  EXPECT_EQ(conclusions(none.runs)[0], "Nothing takes less device memory than plain.");
  none.program.one_memory = true;  // as on a CPU
  EXPECT_EQ(conclusions(none.runs)[0], "Nothing takes less memory than plain.");
  EXPECT_EQ(conclusions({none.runs.data(), 1}).size(), 0u);
}

}  // namespace
}  // namespace strata::page_test
