// The memory page: figures it shows are the plan's, it is one well-formed file, and nothing in it comes from elsewhere.
#include "engine/planning/page.h"

#include "tests/harness.h"

namespace strata {
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
  EXPECT_EQ(count(page, "Device memory over the step"), 2u);
  EXPECT_EQ(count(page, "Host memory over the step"), 1u);
  EXPECT_EQ(count(page, "What ran when"), 2u);
  for (const test::Runner* runner : {&plain, &resting}) {
    const TierPlan& device = runner->plan.device();
    EXPECT_GE(count(page, "<td>" + bytes_text(device.total_bytes()) + "</td>"), 1u);
    EXPECT_GE(count(page, "peak " + bytes_text(device.persistent_bytes + device.live_peak_bytes) + " at "), 1u);
  }
  for (const char* elsewhere : {"http", "<script", "src=", "url(", "@import"})
    EXPECT_EQ(count(page, elsewhere), 0u) << elsewhere;

  const std::string one = memory_page("x", "y", {&runs[1], 1});  // nothing to compare with: no table
  expect_well_formed(one);
  EXPECT_EQ(count(one, "At a glance"), 0u);
}

}  // namespace
}  // namespace strata
