// Scores of files and questions beside logits, and beside the validation loss of training.
#include "engine/runtime/evaluation.h"

#include <cmath>
#include <fstream>

#include "engine/checkpoint/store.h"
#include "engine/data/token_file.h"
#include "engine/runtime/load_parameters.h"
#include "engine/runtime/next_logits.h"
#include "engine/runtime/trainer.h"
#include "tests/harness.h"

namespace strata::evaluation_test {
namespace {

constexpr int64_t kWindow = 16, kVocabulary = 256;

class Evaluation : public testing::Test {
 protected:
  void SetUp() override {
    write_tokens("train.bin", 400);
    write_tokens("validation.bin", 2 * kWindow + 1);
    Session session(config(), {});
    trained_ = train(session, {});
  }
  std::string config() const {
    return test::write_file(
        folder_ / "config.toml",
        "[run]\nsteps = 3\ndirectory = \"" + (folder_ / "run") +
            "\"\n[model]\nplugin = \"gpt\"\nlayers = 1\nhidden = 20\nheads = 2\n[data]\ntrain = [\"" +
            (folder_ / "train.bin") + "\"]\nvalidation = [\"" + (folder_ / "validation.bin") +
            "\"]\nsequence_length = 16\nglobal_batch = 2\nmicro_batch = 2\n[plugins.adamw]\nlearning_rate = 0.05\n");
  }
  std::vector<int32_t> write_tokens(const std::string& name, int64_t count, uint64_t tokenizer = 0) const {
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = int32_t('a' + i * i % 23);
    TokenFileWriter writer(folder_ / name, false, tokenizer);
    writer.append(tokens);
    writer.commit();
    return tokens;
  }
  std::string checkpoint() const { return find_checkpoint(folder_ / "run", "run.directory"); }

  test::TemporaryFolder folder_;
  TrainSummary trained_;
};

// -log p of tokens[first] to the last, from logits in double.
double by_logits(NextLogits& model, const std::vector<int32_t>& tokens, int64_t first) {
  double nats = 0;
  std::vector<float> row(kVocabulary);
  for (size_t t = size_t(first); t < tokens.size(); ++t) {
    const std::vector<std::vector<int32_t>> before{{tokens.begin(), tokens.begin() + int64_t(t)}};
    model.of(before, row.data());
    double sum = 0;
    for (const float logit : row) sum += std::exp(double(logit));
    nats += std::log(sum) - double(row[size_t(tokens[t])]);
  }
  return nats;
}

// The same sequences as validation in training. Means of 32 losses in f32, in another order: 1e-6 is some roundings.
TEST_F(Evaluation, AFileHasItsValidationLoss) {
  Session session(config(), {});
  Evaluator evaluator(session, checkpoint());
  const FileScore score = score_file(evaluator, folder_ / "validation.bin", byte_tokenizer().get(), 0);
  EXPECT_EQ(score.tokens, 32);
  EXPECT_EQ(score.bytes, 32);
  EXPECT_NEAR(score.loss(), trained_.validation_loss, 1e-6 * score.loss());
  EXPECT_NEAR(score.bits_a_byte(), score.loss() / std::log(2.0), 1e-9);
  EXPECT_NEAR(score.perplexity(), std::exp(score.loss()), 1e-9 * score.perplexity());
}

// The last sequence is shorter; losses of f32 beside logits in double.
TEST_F(Evaluation, EveryTokenCountsOnce) {
  const std::vector<int32_t> tokens = write_tokens("odd.bin", 40);
  std::ofstream(folder_ / "odd.txt") << std::string(tokens.begin(), tokens.end());
  Session session(config(), {});
  Evaluator evaluator(session, checkpoint());
  const auto model = whole_window_logits(session, [&](Storage& to) { load_parameters(to, session, checkpoint()); });
  double nats = 0;
  for (int64_t at = 0; at + 1 < 40; at += kWindow)
    nats += by_logits(*model, {tokens.begin() + at, tokens.begin() + std::min<int64_t>(40, at + kWindow + 1)}, 1);
  for (const char* name : {"odd.bin", "odd.txt"}) {
    const FileScore score = score_file(evaluator, folder_ / name, byte_tokenizer().get(), 0);
    EXPECT_EQ(score.tokens, 39) << name;
    EXPECT_EQ(score.bytes, 39) << name;
    EXPECT_NEAR(score.nats, nats, 1e-5 * nats) << name;
  }
  EXPECT_EQ(score_file(evaluator, folder_ / "odd.bin", nullptr, 0).bytes, 0);
}

TEST_F(Evaluation, ChoicesByLikelihood) {
  const std::string file = test::write_file(folder_ / "questions.jsonl",
                                            R"({"context": "abc", "choices": ["q", "bcd", "zzzzzzzz"], "answer": 1}

{"answer": 0, "choices": ["a", "b"], "context": "\u00e9", "more": 7}
)");
  Session session(config(), {});
  Evaluator evaluator(session, checkpoint());
  const auto questions = read_questions(file, *byte_tokenizer(), kWindow, kVocabulary);
  ASSERT_EQ(questions.size(), 2u);
  EXPECT_EQ(questions[0].first, (std::vector<int64_t>{3, 3, 3}));
  EXPECT_EQ(questions[0].bytes, (std::vector<int64_t>{1, 3, 8}));
  EXPECT_EQ(questions[1].place, file + ":3");
  const auto model = whole_window_logits(session, [&](Storage& to) { load_parameters(to, session, checkpoint()); });
  ChoiceScore expected{.questions = 2};
  for (const Question& question : questions) {
    size_t best = 0, best_by_bytes = 0;
    std::vector<double> nats;
    for (size_t i = 0; i < question.tokens.size(); ++i) {
      nats.push_back(by_logits(*model, question.tokens[i], question.first[i]));
      EXPECT_NEAR(evaluator.loss(question.tokens[i], question.first[i]), nats[i], 1e-5 * nats[i]);
      if (nats[i] < nats[best]) best = i;
      if (nats[i] / double(question.bytes[i]) < nats[best_by_bytes] / double(question.bytes[best_by_bytes]))
        best_by_bytes = i;
    }
    expected.right += int64_t(best) == question.answer;
    expected.right_by_bytes += int64_t(best_by_bytes) == question.answer;
  }
  const ChoiceScore score = score_questions(evaluator, questions);
  EXPECT_EQ(score.questions, 2);
  EXPECT_EQ(score.right, expected.right);
  EXPECT_EQ(score.right_by_bytes, expected.right_by_bytes);
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    return error.what();
  }
  return "none";
}

TEST_F(Evaluation, FilesThatCannotBeScored) {
  write_tokens("one.bin", 1);
  write_tokens("other.bin", 20, 7);
  test::write_file(folder_ / "short.txt", "a");
  Session session(config(), {});
  Evaluator evaluator(session, checkpoint());
  const auto tokenizer = byte_tokenizer();
  const auto why = [&](const std::string& name) {
    return refusal([&] { score_file(evaluator, folder_ / name, tokenizer.get(), 8); });
  };
  EXPECT_EQ(why("one.bin"), folder_ / "one.bin" + ": has one token; two are the fewest of which one can be predicted.");
  EXPECT_EQ(why("other.bin"),
            folder_ / "other.bin" + ": was made with another tokenizer than the model's; prepare it with the model's.");
  EXPECT_EQ(why("short.txt"),
            folder_ / "short.txt" + ": its text has fewer than two tokens; nothing can be predicted.");
  EXPECT_EQ(why("missing.txt"), folder_ / "missing.txt" + ": cannot read it: No such file or directory.");
}

TEST(Questions, ThatCannotBeAsked) {
  const test::TemporaryFolder folder;
  const std::string file = folder / "q.jsonl";
  const std::pair<const char*, const char*> cases[] = {
      {R"({"choices": ["a", "b"], "answer": 0})",
       "has no \"context\"; each line must be an object with context, choices and answer."},
      {R"({"context": "a", "choices": ["a"], "answer": 0})", "choices: expected at least two, but got 1."},
      {R"({"context": "a", "choices": ["a", "b"], "answer": 2})",
       "answer: expected 0 to 1, which counts choices, but it is 2."},
      {R"({"context": "a", "choices": ["a", ""], "answer": 1})", "choices[1]: is empty; a choice must have text."},
      {R"({"context": "", "choices": ["a", "b"], "answer": 1})",
       "choices[0]: has nothing before it: give a context, as this tokenizer begins documents with no token."},
      {R"({"context": "abcd", "choices": ["b", "efg"], "answer": 1})",
       "choices[1]: has 7 tokens with its context, but the window of the model (data.sequence_length) is 5; shorten "
       "the "
       "context or raise data.sequence_length."},
      {R"({"context": "z", "choices": ["a", "b"], "answer": 1})",
       "choices[0]: its text has token 122, but the model knows only ids below 122."},
  };
  for (const auto& [line, problem] : cases) {
    test::write_file(file, "\n" + std::string(line) + "\n");
    EXPECT_EQ(refusal([&] { read_questions(file, *byte_tokenizer(), 5, 122); }), file + ":2: " + problem);
  }
  test::write_file(file, "{");
  EXPECT_EQ(refusal([&] { read_questions(file, *byte_tokenizer(), 5, 122); }).find(file + ":1"), 0u);
  test::write_file(file, "\n");
  EXPECT_EQ(refusal([&] { read_questions(file, *byte_tokenizer(), 5, 122); }), file + ": has no questions.");
}

}  // namespace
}  // namespace strata::evaluation_test
