// Files and questions to sums of likelihoods; see evaluation.h.
#include "engine/runtime/evaluation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "engine/data/text_reader.h"
#include "engine/data/sampler.h"
#include "engine/data/token_file.h"
#include "strata/error.h"
#include "strata/json.h"

namespace strata {
namespace {

void require_known(const std::vector<int32_t>& tokens, int64_t vocabulary, const std::string& place) {
  for (const int32_t id : tokens)
    if (id < 0 || id >= vocabulary)
      throw Error(
          fmt::format("{}: its text has token {}, but the model knows only ids below {}.", place, id, vocabulary));
}

std::vector<int32_t> document_tokens(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<int32_t> tokens = tokenizer.document_begin();
  const std::vector<int32_t> of_text = tokenizer.encode(text);
  tokens.insert(tokens.end(), of_text.begin(), of_text.end());
  return tokens;
}

// Bytes of the text of all of a file's tokens but the first; `read(offset, count)` gives some of them.
template <class Read>
int64_t text_bytes(const Tokenizer& tokenizer, int64_t count, Read&& read) {
  constexpr int64_t kPiece = 65536,
                    kBefore = 8;  // a character is at most 4 tokens: it is in one piece with those before
  const std::vector<int32_t> begin = tokenizer.document_begin(), end = tokenizer.document_end();
  const auto is_no_text = [&](int32_t id) {
    return !tokenizer.knows(id) || std::find(begin.begin(), begin.end(), id) != begin.end() ||
           std::find(end.begin(), end.end(), id) != end.end();
  };
  int64_t bytes = 0;
  for (int64_t at = 1; at < count; at += kPiece) {
    const int64_t first = std::max<int64_t>(0, at - kBefore);
    std::vector<int32_t> before = read(first, at - first), tokens = read(at, std::min(kPiece, count - at));
    for (auto* some : {&before, &tokens}) std::erase_if(*some, is_no_text);
    bytes += int64_t(decode_after(tokenizer, before, tokens).size());
  }
  return bytes;
}

template <class Read>
FileScore score_tokens(Evaluator& evaluator, int64_t count, const Tokenizer* tokenizer, Read&& read) {
  FileScore score{.nats = 0, .tokens = count - 1, .bytes = tokenizer ? text_bytes(*tokenizer, count, read) : 0};
  for (int64_t at = 0; at + 1 < count; at += evaluator.window())
    score.nats += evaluator.loss(read(at, std::min(evaluator.window() + 1, count - at)));
  return score;
}

// One sequence of a file after the other, as training has them.
FileScore score_packed(Evaluator& evaluator, const TokenDataset& data) {
  const Sampler sampler(data, evaluator.window(), false, 0, true);
  std::vector<int32_t> tokens(size_t(evaluator.window())), targets(tokens), documents(tokens);
  FileScore score;
  for (int64_t sample = 0; sample < sampler.sequences(); ++sample) {
    sampler.fill(sample, {tokens.data(), targets.data(), documents.data()});
    score.nats += evaluator.loss(tokens.data(), targets.data(), documents.data());
    score.tokens += sampler.counted(sample);
  }
  return score;
}

FileScore score_masked(Evaluator& evaluator, const TokenFile& file) {
  const int64_t window = evaluator.window();
  std::vector<int32_t> tokens(size_t(window) + 1), targets(size_t(window), 0);
  FileScore score{.tokens = file.mask()->counted(1, file.tokens() - 1)};
  for (int64_t at = 0; at + 1 < file.tokens(); at += window) {
    const int64_t count = std::min(window, file.tokens() - 1 - at);  // of targets
    std::fill(tokens.begin(), tokens.end(), 0);
    file.read(at, count + 1, tokens.data());
    for (int64_t i = 0; i < window; ++i)
      targets[size_t(i)] = i < count && file.mask()->counts(at + i + 1) ? tokens[size_t(i) + 1] : -1;
    score.nats += evaluator.loss(tokens.data(), targets.data());
  }
  return score;
}

FileScore score_token_file(Evaluator& evaluator, const std::string& path, const Tokenizer* tokenizer,
                           uint64_t tokenizer_checksum) {
  const TokenDataset data({path}, evaluator.vocabulary());
  const TokenFile& file = data.files().front();
  if (tokenizer_checksum != 0 && file.tokenizer() != 0 && file.tokenizer() != tokenizer_checksum)
    throw Error(path + ": was made with another tokenizer than the model's; prepare it with the model's.");
  if (file.tokens() < 2) throw Error(path + ": has one token; two are the fewest of which one can be predicted.");
  if (evaluator.packed() || file.mask()) {
    const FileScore score = evaluator.packed() ? score_packed(evaluator, data) : score_masked(evaluator, file);
    if (score.tokens == 0) throw Error(path + ": its loss mask lets no token count; there is nothing to measure.");
    return score;
  }
  return score_tokens(evaluator, file.tokens(), tokenizer, [&](int64_t at, int64_t count) {
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    file.read(at, count, tokens.data());
    return tokens;
  });
}

Question question_of(const std::string& line, const std::string& place, const Tokenizer& tokenizer, int64_t window,
                     int64_t vocabulary) {
  const Json json = Json::parse(line, place);
  const auto field = [&](const char* name) -> const Json& {
    const Json* value = json.find(name);
    if (!value)
      throw Error(
          fmt::format("{}: has no \"{}\"; each line must be an object with context, choices and answer.", place, name));
    return *value;
  };
  Question question{.place = place, .tokens = {}, .first = {}, .bytes = {}};
  const std::string& context = field("context").string(place + ": context");
  const Json::Array& choices = field("choices").array(place + ": choices");
  question.answer = field("answer").integer(place + ": answer");
  if (choices.size() < 2)
    throw Error(fmt::format("{}: choices: expected at least two, but got {}.", place, choices.size()));
  if (question.answer < 0 || question.answer >= int64_t(choices.size()))
    throw Error(fmt::format("{}: answer: expected 0 to {}, which counts choices, but it is {}.", place,
                            choices.size() - 1, question.answer));
  const std::vector<int32_t> alone = document_tokens(tokenizer, context);
  for (size_t i = 0; i < choices.size(); ++i) {
    const std::string name = fmt::format("{}: choices[{}]", place, i);
    const std::string& choice = choices[i].string(name);
    if (choice.empty()) throw Error(name + ": is empty; a choice must have text.");
    std::vector<int32_t> tokens = document_tokens(tokenizer, context + choice);
    require_known(tokens, vocabulary, name);
    // The border may lie within a token, or text behind it may change one: what differs is the choice's.
    const auto border = std::mismatch(alone.begin(), alone.end(), tokens.begin(), tokens.end());
    const int64_t first = std::min(border.second - tokens.begin(), std::ptrdiff_t(tokens.size()) - 1);
    if (first == 0)
      throw Error(name + ": has nothing before it: give a context, as this tokenizer begins documents with no token.");
    if (int64_t(tokens.size()) > window + 1)
      throw Error(
          fmt::format("{}: has {} tokens with its context, but the window of the model "
                      "(data.sequence_length) is {}; shorten the context or raise data.sequence_length.",
                      name, tokens.size(), window));
    question.tokens.push_back(std::move(tokens));
    question.first.push_back(first);
    question.bytes.push_back(int64_t(choice.size()));
  }
  return question;
}

}  // namespace

FileScore& FileScore::operator+=(const FileScore& other) {
  const bool known = (tokens == 0 || bytes > 0) && (other.tokens == 0 || other.bytes > 0);
  nats += other.nats;
  tokens += other.tokens;
  bytes = known ? bytes + other.bytes : 0;
  return *this;
}
double FileScore::perplexity() const { return std::exp(loss()); }
double FileScore::bits_a_byte() const {
  return bytes > 0 ? nats / std::numbers::ln2 / double(bytes) : std::numeric_limits<double>::quiet_NaN();
}

FileScore score_file(Evaluator& evaluator, const std::string& path, const Tokenizer* tokenizer,
                     uint64_t tokenizer_checksum) {
  if (path.ends_with(".bin")) return score_token_file(evaluator, path, tokenizer, tokenizer_checksum);
  STRATA_CHECK(tokenizer);
  const std::string text = whole_text(path);
  const std::vector<int32_t> tokens = document_tokens(*tokenizer, text);
  if (tokens.size() < 2) throw Error(path + ": its text has fewer than two tokens; nothing can be predicted.");
  require_known(tokens, evaluator.vocabulary(), path);
  return score_tokens(evaluator, int64_t(tokens.size()), tokenizer, [&](int64_t at, int64_t count) {
    return std::vector<int32_t>(tokens.begin() + at, tokens.begin() + at + count);
  });
}

std::vector<Question> read_questions(const std::string& path, const Tokenizer& tokenizer, int64_t window,
                                     int64_t vocabulary) {
  const std::string text = whole_text(path);
  std::vector<Question> questions;
  int64_t number = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    std::string line = text.substr(at, end - at);
    at = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    questions.push_back(question_of(line, fmt::format("{}:{}", path, number), tokenizer, window, vocabulary));
  }
  if (questions.empty()) throw Error(path + ": has no questions.");
  return questions;
}

ChoiceScore score_questions(Evaluator& evaluator, const std::vector<Question>& questions) {
  ChoiceScore score;
  for (const Question& question : questions) {
    std::vector<double> whole, a_byte;
    for (size_t i = 0; i < question.tokens.size(); ++i) {
      whole.push_back(evaluator.loss(question.tokens[i], question.first[i]));
      a_byte.push_back(whole.back() / double(question.bytes[i]));
    }
    const auto likeliest = [](const std::vector<double>& losses) {
      return std::min_element(losses.begin(), losses.end()) - losses.begin();
    };
    ++score.questions;
    score.right += likeliest(whole) == question.answer;
    score.right_by_bytes += likeliest(a_byte) == question.answer;
  }
  return score;
}

}  // namespace strata
