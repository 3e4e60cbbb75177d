// Results and forms of exchanged gradients (strata/exchange.h): any form under data_parallel and every stage of zero,
// forms that need finite values under loss scaling, and what is refused.
#include <cmath>
#include <cstring>
#include <random>

#include "tests/harness.h"

namespace strata::gradient_exchange_test {
namespace {

constexpr int kVocabulary = 61, kSequence = 16, kBatch = 8, kSteps = 6;

std::string toml(int ranks, const std::string& plugins, const std::string& mesh = "") {
  return "[model]\nplugin = \"gpt\"\nlayers = 2\nhidden = 32\nheads = 4\nffn = 71\nvocabulary = 61\ncontext = "
         "16\n[data]\n"
         "train = [\"none\"]\nsequence_length = 16\nglobal_batch = 8\nmicro_batch = 1\n[device]\nthreads = 1\n[mesh]\n"
         "data = " +
         std::to_string(ranks) + "\n" + mesh + "[plugins.sm3]\n[plugins.clip]\nmax_norm = 0.1\n" + plugins;
}

const std::string kWanting[] = {
    "[plugins.data_parallel]\nbucket = 20000\n", "[plugins.zero]\nstage = 1\nbucket = 20000\n",
    "[plugins.zero]\nstage = 2\nbucket = 20000\n", "[plugins.zero]\nstage = 3\nbucket = 20000\n"};

// Ranks along `expert` share what is no expert's.
const std::string kExperts = "expert = 2\n[plugins.moe]\nexperts = 4\nffn = 24\n";

// A form of the test's own for all gradients, or those of an axis.
class Form : public Plugin {
 public:
  explicit Form(ExchangeForm form, std::string axis = "data") : form_(std::move(form)), axis_(std::move(axis)) {}
  void exchange(ExchangeStage& stage) override {
    for (const Gradient& gradient : stage.gradients()) stage.form(gradient, form_, axis_);
  }

 private:
  ExchangeForm form_;
  std::string axis_;
};

std::vector<TensorId> as_they_are(GradientBucket& bucket) {
  std::vector<TensorId> all;
  for (size_t i = 0; i < bucket.size(); ++i) all.push_back(bucket.gradient(i));
  return bucket.sum(all);
}
std::vector<TensorId> in_bf16(GradientBucket& bucket) {
  std::vector<TensorId> narrow, wide;
  for (size_t i = 0; i < bucket.size(); ++i)
    narrow.push_back(bucket.emit("cast", {bucket.gradient(i)}, {{"dtype", "bf16"}}));
  for (TensorId sum : bucket.sum(narrow)) wide.push_back(bucket.emit("cast", {sum}, {{"dtype", "f32"}}));
  return wide;
}

// Losses of some steps; `look` sees rank 0's run in the end.
std::vector<double> losses(int ranks, const std::string& text, const std::vector<Plugin*>& plugins,
                           const std::function<void(test::Runner&)>& look = {}) {
  std::vector<double> result;
  run_local(ranks, [&](World& world) {
    std::vector<NamedPlugin> more;
    for (size_t i = 0; i < plugins.size(); ++i) more.push_back({"form" + std::to_string(i), plugins[i]});
    // Plugins keep nothing between plans, so ranks may share them.
    test::Runner runner(text, more, Goal::train, {}, ranks > 1 ? &world : nullptr);
    std::mt19937 random(7);
    std::vector<int32_t> tokens(size_t(kBatch * kSequence)), targets(tokens.size());
    for (int step = 0; step < kSteps; ++step) {
      for (auto* list : {&tokens, &targets})
        for (int32_t& token : *list) token = int32_t(random() % kVocabulary);
      const double loss = runner.run_step(tokens.data(), targets.data());
      if (world.rank() == 0) result.push_back(loss);
    }
    if (world.rank() == 0 && look) look(runner);
  });
  return result;
}

int exchanges(const Program& program, std::string_view kind, DType dtype) {
  int count = 0;
  for (const Op& op : program.ops)
    count += op.kind->name == kind && program[op.inputs[0]].dtype == dtype &&
             (op.step_part == StepPart::backward || op.step_part == StepPart::reduce);  // not of optimizers' statistics
  return count;
}

TEST(GradientExchange, AFormThatChangesNothingIsTheEnginesOwn) {
  Form plain({.name = "as they are", .exchange = as_they_are});
  size_t number = 0;
  for (const std::string& wanting : kWanting)
    for (const std::string& mesh : {std::string(), std::string("replicate = 2\n"), kExperts}) {
      if (test::left_out(number++)) continue;
      SCOPED_TRACE(wanting + mesh);
      const std::string text = toml(4, wanting, mesh);
      std::string program, formed;
      const auto expected = losses(4, text, {}, [&](test::Runner& r) { program = print(r.built.program); });
      EXPECT_EQ(losses(4, text, {&plain}, [&](test::Runner& r) { formed = print(r.built.program); }), expected);
      EXPECT_EQ(formed, program);
    }
}

// Rows that do not divide by the ranks, accumulation, shares within groups: everything that was summed in f32 crosses
// in bf16, and training goes on as it did but for the rounding.
TEST(GradientExchange, AFormWorksWithWhateverIsWanted) {
  Form half({.name = "bf16", .exchange = in_bf16});
  const auto expected = losses(1, toml(1, ""), {});
  size_t number = 0;
  for (const std::string& wanting : kWanting)
    for (const auto& [ranks, mesh] : {std::pair(2, ""), std::pair(4, "replicate = 2\n")}) {
      if (test::left_out(number++)) continue;
      SCOPED_TRACE(wanting + mesh);
      const auto actual = losses(ranks, toml(ranks, wanting, mesh), {&half}, [&](test::Runner& r) {
        const Program& program = r.built.program;
        EXPECT_EQ(exchanges(program, "all_reduce", DType::f32) + exchanges(program, "reduce_scatter", DType::f32), 0);
        EXPECT_GT(exchanges(program, wanting.find("zero") == std::string::npos ? "all_reduce" : "reduce_scatter",
                            DType::bf16),
                  0);
      });
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-3 * expected[i]);
      EXPECT_NE(actual, expected);
    }
}

// What is no expert's crosses once, among all ranks that share it, in the form that was set for the data ranks.
TEST(GradientExchange, AFormIsOfAllThatShare) {
  Form half({.name = "bf16", .exchange = in_bf16});
  for (size_t stage = 1; stage <= 3; ++stage)
    for (const std::string mesh : {"", "replicate = 2\n"})
      losses(mesh.empty() ? 4 : 8, toml(mesh.empty() ? 4 : 8, kWanting[stage], mesh + kExperts), {&half},
             [&](test::Runner& r) {
               std::map<std::string, int> scattered;  // by axis
               for (const Op& op : r.built.program.ops)
                 if (op.kind->name == "reduce_scatter" && op.step_part != StepPart::forward) {
                   EXPECT_EQ(r.built.program[op.inputs[0]].dtype, DType::bf16);
                   ++scattered[op.attributes.string("axis")];
                 }
               EXPECT_GT(scattered["shard_expert"], 0);
               EXPECT_EQ(scattered["expert"], 0);
               EXPECT_GT(scattered["shard"], 0) << "experts' own";
             });
}

// The slow link between groups alone is compressed.
TEST(GradientExchange, AFormMayBeOfOneAxisAlone) {
  Form half({.name = "bf16", .exchange = in_bf16}, "replicate");
  for (const std::string& wanting : {kWanting[0], kWanting[1]})
    losses(4, toml(4, wanting, "replicate = 2\n"), {&half}, [&](test::Runner& r) {
      for (const Op& op : r.built.program.ops)
        if ((op.kind->name == "all_reduce" || op.kind->name == "reduce_scatter") && op.step_part == StepPart::reduce &&
            r.built.program[op.inputs[0]].dtype != DType::f64) {
          const bool over_replicate = op.attributes.string("axis") == "replicate";
          EXPECT_EQ(r.built.program[op.inputs[0]].dtype, over_replicate ? DType::bf16 : DType::f32);
        }
      EXPECT_GT(exchanges(r.built.program, "all_reduce", DType::bf16), 0);
    });
}

// Adds each gradient to what it remembers, but where the step overflowed.
void register_remember() {
  const Kernel kernel{[](const Binding& b) -> Launch {
                        return [b] {
                          const bool skip = b.has_input(2) && std::isnan(*b.in<double>(2));
                          for (int64_t i = 0; i < elements(b.output(0).shape) && !skip; ++i)
                            b.out<float>(0)[i] += b.in<float>(1)[i];
                        };
                      },
                      {}};
  static const bool once = [&] {
    register_kind({.name = "remember",
                   .summary = "a test's",
                   .shape =
                       [](const OpView& v) {
                         return std::vector<TensorSpec>{{v.input(0).shape, DType::f32}};
                       },
                   .kernels = {{"cpu", kernel}}});
    return true;
  }();
  (void)once;
}
std::vector<TensorId> remembering(GradientBucket& bucket) {
  for (size_t i = 0; i < bucket.size(); ++i) {
    Builder& build = bucket.build();
    const TensorId gradient = bucket.gradient(i);
    const TensorId memory = build.state(bucket.parameter(i) + ".memory", build[gradient].shape, DType::f32);
    build.emit_all("remember", {memory, gradient, bucket.overflow(i)}, {}, {memory});
  }
  return as_they_are(bucket);
}

// Powers of two: whether the loss scale is taken out before or after the sum changes no bit, unless the form sees it.
TEST(GradientExchange, AFormThatNeedsFiniteValuesComesAfterUnscaling) {
  register_remember();
  Form form({.name = "remembering", .exchange = remembering, .needs_finite = true});
  const std::string half = "[plugins.mixed_precision]\ndtype = \"fp16\"\nloss_scale = ";
  for (const std::string& wanting : {kWanting[0], kWanting[1]}) {
    const std::string huge = toml(2, wanting + half + "33554432.0\n");  // 2^25: some steps overflow, some do not
    SCOPED_TRACE(huge);
    const auto scale = [](test::Runner& r) { return *static_cast<const double*>(r.storage->persistent("loss_scale")); };
    double end = 0;
    const auto expected = losses(2, huge, {}, [&](test::Runner& r) { end = scale(r); });
    EXPECT_LT(end, 33554432.0) << "no step overflowed";
    const auto actual = losses(2, huge, {&form}, [&](test::Runner& r) {
      EXPECT_EQ(scale(r), end);
      double sum = 0;
      for (const Tensor& tensor : r.storage->persistent_tensors())
        if (tensor.name.text().ends_with(".memory"))
          for (float value : r.values(tensor.name)) {
            EXPECT_TRUE(std::isfinite(value)) << tensor.name;
            sum += std::abs(value);
            if (!std::isfinite(value)) return;
          }
      EXPECT_GT(sum, 0);
      EXPECT_LT(sum, 1e5) << "scaled";
    });
    EXPECT_EQ(actual, expected);
  }
}

std::string refusal(const std::string& text, const std::vector<NamedPlugin>& more) {
  const test::TemporaryFolder folder;
  const Session session(test::write_file(folder / "config.toml", text), {});
  std::vector<NamedPlugin> plugins = session.plugins;
  plugins.insert(plugins.end(), more.begin(), more.end());
  try {
    build_program(plugins, session.batch(Goal::train), Goal::train, session.mesh.planner());
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

class Wants final : public Plugin {
 public:
  explicit Wants(GradientResult result) : result_(std::move(result)) {}
  void exchange(ExchangeStage& stage) override {
    for (const Gradient& gradient : stage.gradients()) stage.want(gradient, result_);
  }

 private:
  GradientResult result_;
};

TEST(GradientExchange, WhatContradictsIsRefusedWithBothNames) {
  Form one({.name = "one", .exchange = as_they_are}), two({.name = "two", .exchange = as_they_are}),
      between({.name = "between", .exchange = as_they_are}, "replicate");
  const std::string text = toml(2, kWanting[0]);
  std::string found = refusal(text, {{"first", &one}, {"second", &two}});
  EXPECT_NE(found.find("plugins \"first\" and \"second\" both set the form of the gradient of "), std::string::npos)
      << found;
  found = refusal(text, {{"first", &one}, {"second", &between}});
  EXPECT_NE(found.find("over axis \"replicate\"; enable only one of them."), std::string::npos) << found;
  Wants again({});
  found = refusal(text, {{"again", &again}});
  EXPECT_NE(found.find("plugins \"data_parallel\" and \"again\" both set the result"), std::string::npos) << found;
  Wants nowhere({.shared_over = "tensor"});
  found = refusal(toml(2, ""), {{"nowhere", &nowhere}});
  EXPECT_NE(found.find("which is no part of axis \"data\""), std::string::npos) << found;
  Wants shared({.shared_over = "shard_expert"});
  found = refusal(toml(4, "", kExperts), {{"shared", &shared}});
  EXPECT_NE(found.find("axis \"shard_expert\", but axis \"expert\" splits that parameter already."), std::string::npos)
      << found;
  Form inner({.name = "inner", .exchange = as_they_are}, "expert");
  found = refusal(toml(4, kWanting[1], kExperts), {{"inner", &inner}});
  EXPECT_NE(found.find("plugin \"zero\" wants the gradient of "), std::string::npos) << found;
  EXPECT_NE(found.find(" in shares over axis \"shard_expert\", which is one exchange"), std::string::npos) << found;
  found = refusal(toml(1, ""), {{"nobody", &one}});
  EXPECT_EQ(found, "");
  found = refusal(toml(2, ""), {{"nobody", &one}});
  EXPECT_NE(found.find("no enabled plugin sums gradients"), std::string::npos) << found;

  Form lazy({.name = "lazy", .exchange = [](GradientBucket&) { return std::vector<TensorId>{}; }});
  found = refusal(text, {{"lazy", &lazy}});
  EXPECT_NE(found.find("the exchange form \"lazy\" made 0 results of "), std::string::npos) << found;
  Form narrow({.name = "narrow", .exchange = [](GradientBucket& bucket) {
                 std::vector<TensorId> all;
                 for (TensorId sum : as_they_are(bucket))
                   all.push_back(bucket.emit("cast", {sum}, {{"dtype", "bf16"}}));
                 return all;
               }});
  found = refusal(text, {{"narrow", &narrow}});
  EXPECT_NE(found.find("the exchange form \"narrow\" made bf16"), std::string::npos) << found;
  Form throws(
      {.name = "throws", .exchange = [](GradientBucket&) -> std::vector<TensorId> { throw Error("matrices alone."); }});
  found = refusal(text, {{"throws", &throws}});
  EXPECT_NE(found.find("the exchange form \"throws\": matrices alone."), std::string::npos) << found;

  Form careful({.name = "careful", .exchange = as_they_are, .needs_finite = true});
  const std::string half = "[plugins.mixed_precision]\ndtype = \"fp16\"\n";
  found = refusal(toml(2, kWanting[2] + half), {{"careful", &careful}});
  EXPECT_NE(found.find("plugin \"zero\" wants the gradient of "), std::string::npos) << found;
  EXPECT_NE(found.find("the form \"careful\" of plugin \"careful\" needs finite gradients"), std::string::npos)
      << found;
  EXPECT_EQ(refusal(toml(2, kWanting[1] + half), {{"careful", &careful}}), "");
  EXPECT_EQ(refusal(toml(2, kWanting[2]), {{"careful", &careful}}), "") << "without loss scaling";
}

}  // namespace
}  // namespace strata::gradient_exchange_test
