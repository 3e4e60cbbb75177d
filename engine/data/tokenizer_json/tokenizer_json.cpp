// From text to tokens: added tokens, normalizer, pre-tokenizer, byte-pair encoding; see tokenizer_json.h.
#include "engine/data/tokenizer_json/tokenizer_json.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "engine/data/text_reader.h"
#include "engine/data/tokenizer_json/added_tokens.h"
#include "engine/data/tokenizer_json/byte_pairs.h"
#include "engine/data/tokenizer_json/decoder.h"
#include "engine/data/tokenizer_json/field.h"
#include "engine/data/tokenizer_json/normalizer.h"
#include "engine/data/tokenizer_json/pre_tokenizer.h"
#include "engine/data/tokenizer_json/unicode.h"
#include "strata/error.h"

namespace strata {
namespace {

// The tokens that a post-processor puts around a document.
struct Template {
  std::vector<int32_t> begin, end;
};

void add_processor(const Field& field, Template& to);

void add_template(const Field& field, Template& to) {
  field.only({"type", "single", "pair", "special_tokens"});  // pairs of texts do not come here
  bool before = true;
  const Field tokens = field.at("special_tokens");
  for (const Field& piece : field.at("single").items()) {
    piece.only({"Sequence", "SpecialToken"});
    if (const auto sequence = piece.find("Sequence")) {
      if (!before) piece.refuse("has the text twice.");
      before = false;
      continue;
    }
    const Field token = tokens.at(piece.at("SpecialToken").at("id").text());
    for (const Field& id : token.at("ids").items()) {
      if (id.integer() < 0 || id.integer() >= INT32_MAX) id.refuse("is no id of a token.");
      (before ? to.begin : to.end).push_back(int32_t(id.integer()));
    }
  }
  if (before) field.at("single").refuse("lacks the text.");
}

void add_processor(const Field& field, Template& to) {
  const std::string type = field.type();
  if (type == "Sequence") {
    field.only({"type", "processors"});
    for (const Field& part : field.at("processors").items()) add_processor(part, to);
  } else if (type == "TemplateProcessing") {
    if (!to.begin.empty() || !to.end.empty()) field.refuse("is a second template, which is not supported.");
    add_template(field, to);
  } else if (type != "ByteLevel") {  // changes offsets only
    field.refuse("type \"" + type + "\" is not supported; TemplateProcessing, ByteLevel and Sequence are.");
  }
}

class JsonTokenizer final : public Tokenizer {
 public:
  explicit JsonTokenizer(const Field& file)
      : normalizer_(file.find("normalizer") ? Normalizer(file.at("normalizer")) : Normalizer()),
        pre_tokenizer_(file.find("pre_tokenizer") ? PreTokenizer(file.at("pre_tokenizer")) : PreTokenizer()),
        model_(file.at("model"), pre_tokenizer_.byte_level()),
        decoder_(file.find("decoder") ? Decoder(file.at("decoder")) : Decoder()) {
    file.only({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
               "decoder", "model"});
    if (const auto version = file.find("version"); version && version->text() != "1.0")
      version->refuse("\"" + version->text() + "\" is not supported; \"1.0\" is.");
    for (const char* name : {"truncation", "padding"})
      if (const auto asked = file.find(name)) asked->refuse("is not supported; make it null.");
    for (const auto& [text, id] : model_.vocabulary()) texts_.emplace(id, text);
    if (const auto added = file.find("added_tokens"))
      for (const Field& token : added->items()) add_token(token);
    if (const auto processor = file.find("post_processor")) {
      add_processor(*processor, template_);
      for (const std::vector<int32_t>* ids : {&template_.begin, &template_.end})
        for (const int32_t id : *ids)
          if (!knows(id)) processor->refuse("id " + std::to_string(id) + " is no token.");
    }
    for (const auto& [id, text] : texts_) vocabulary_ = std::max(vocabulary_, int64_t{id} + 1);
  }

  std::vector<int32_t> encode(std::string_view text) const override { return encode_part({.text = text}).ids; }
  EncodedPart encode_part(const TextPart& part) const override;
  std::string decode(const std::vector<int32_t>& ids) const override {
    std::vector<std::string> tokens;
    for (const int32_t id : ids) {
      const auto found = texts_.find(id);
      if (found == texts_.end()) throw Error("token " + std::to_string(id) + " is none of the tokenizer's.");
      tokens.push_back(found->second);
    }
    return decoder_.decode(std::move(tokens));
  }
  bool knows(int32_t id) const override { return texts_.contains(id); }
  int64_t vocabulary() const override { return vocabulary_; }
  std::vector<int32_t> document_begin() const override { return template_.begin; }
  std::vector<int32_t> document_end() const override { return template_.end; }

 private:
  class Encoding;
  // Of a word, that a token of the model stands for.
  size_t bytes_of(int32_t id) const {
    const std::string& text = texts_.at(id);
    if (pre_tokenizer_.byte_level())  // a character a byte
      return size_t(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
    const bool is_byte = text.size() == 6 && text.starts_with("<0x") && text.ends_with(">");
    return is_byte ? 1 : text.size();
  }
  void add_token(const Field& field) {
    field.only({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    AddedToken token{.content = field.at("content").text(),
                     .single_word = field.flag("single_word", false),
                     .strip_left = field.flag("lstrip", false),
                     .strip_right = field.flag("rstrip", false),
                     .special = field.flag("special", false)};
    token.normalized = field.flag("normalized", !token.special);
    const int64_t id = field.at("id").integer();
    if (id < 0 || id >= INT32_MAX) field.at("id").refuse("is out of range.");
    token.id = int32_t(id);
    const auto in_model = model_.vocabulary().find(token.content);
    if (in_model != model_.vocabulary().end() && in_model->second != token.id)
      field.at("id").refuse("is " + std::to_string(id) + ", but the model has \"" + token.content + "\" as " +
                            std::to_string(in_model->second) + ".");
    if (const auto [known, is_new] = texts_.emplace(token.id, token.content); !is_new && known->second != token.content)
      field.at("id").refuse("is that of \"" + known->second + "\", too.");
    if (token.normalized)
      normalized_tokens_.add(token, normalizer_.apply(token.content));
    else
      raw_tokens_.add(token, token.content);
  }
  // Memories wait here between encodings, of which there are as many at once as threads.
  std::unique_ptr<BytePairs::Memory> borrow() const {
    const std::lock_guard lock(mutex_);
    if (memories_.empty()) return std::make_unique<BytePairs::Memory>();
    auto memory = std::move(memories_.back());
    memories_.pop_back();
    return memory;
  }
  void give_back(std::unique_ptr<BytePairs::Memory> memory) const {
    const std::lock_guard lock(mutex_);
    memories_.push_back(std::move(memory));
  }

  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  BytePairs model_;
  Decoder decoder_;
  Template template_;
  AddedTokens raw_tokens_, normalized_tokens_;  // searched before and after normalization
  std::unordered_map<int32_t, std::string> texts_;
  int64_t vocabulary_ = 0;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<BytePairs::Memory>> memories_;
};

// One text on its way through.
class JsonTokenizer::Encoding {
 public:
  Encoding(const JsonTokenizer& tokenizer, const TextPart& part, BytePairs::Memory& memory)
      : tokenizer_(tokenizer), part_(part), memory_(memory) {
    result_.ids.reserve(part.text.size() / 3);
    tokenizer_.raw_tokens_.divide(
        part.text, [&](int32_t id, size_t begin) { add(id, begin); },
        [&](size_t begin, size_t end) { section(begin, end); });
  }
  EncodedPart result_;

 private:
  // Text without raw added tokens.
  void section(size_t begin, size_t end) {
    tokenizer_.normalizer_.apply(part_.text.substr(begin, end - begin), begin, normalized_);
    const Source source = normalized_.source();
    const std::string_view text = normalized_.text;
    tokenizer_.normalized_tokens_.divide(
        text, [&](int32_t id, size_t from) { add(id, source.document_byte(from)); },
        [&](size_t from, size_t to) {
          tokenizer_.pre_tokenizer_.divide(
              {.text = text.substr(from, to - from),
               .first = part_.begins && begin == 0 && from == 0,
               .open = !part_.ends && end == part_.text.size() && to == text.size(),
               .source = {nullptr, &source, from}},
              [&](std::string_view word, const Source& where, size_t at) { take(word, where, at); });
        });
  }
  void take(std::string_view word, const Source& source, size_t at) {
    for (size_t begin = 0, end = word.size(); begin < word.size(); begin = end, end = word.size()) {
      if (end - begin > kLongWord) end = begin + tokenizer_.model_.first_part(word.substr(begin));
      const std::string_view one = word.substr(begin, end - begin);
      if (!part_.begins || !part_.ends) remember_cut(one, source, at + begin);
      const size_t first = result_.ids.size();
      tokenizer_.model_.encode(one, memory_, result_.ids);
      if (part_.places) place(first, one, source, at + begin);
    }
  }
  void add(int32_t id, std::optional<size_t> byte) {
    result_.ids.push_back(id);
    if (part_.places) begin_at(byte);
  }
  void begin_at(std::optional<size_t> byte) {
    const size_t before = result_.begins.empty() ? 0 : result_.begins.back();
    result_.begins.push_back(std::max(byte.value_or(before), before));
  }
  // Where the tokens of a word begin, from `first` on: by their lengths, or with the word where those are not the
  // word's (what the model does not know has no length).
  void place(size_t first, std::string_view word, const Source& source, size_t at) {
    size_t length = 0;
    for (size_t i = first; i < result_.ids.size(); ++i) length += tokenizer_.bytes_of(result_.ids[i]);
    size_t offset = 0;
    for (size_t i = first; i < result_.ids.size(); ++i) {
      begin_at(source.document_byte(at + (length == word.size() ? offset : 0)));
      offset += tokenizer_.bytes_of(result_.ids[i]);
    }
  }
  // Spaces may belong to an added token that comes after them: they are cut nowhere.
  void remember_cut(std::string_view word, const Source& source, size_t at) {
    if (word.find_first_not_of(" \t\r\n") == word.npos) return;
    const auto byte = source.document_byte(at);
    if (!byte || !part_.wants_cut(*byte)) return;
    if (result_.cuts.empty() || result_.cuts.back().byte < *byte) result_.cuts.push_back({*byte, result_.ids.size()});
  }

  static constexpr size_t kLongWord = 24;  // bytes; words below are not looked through for parts
  const JsonTokenizer& tokenizer_;
  const TextPart& part_;
  BytePairs::Memory& memory_;
  Normalizer::Result normalized_;
};

EncodedPart JsonTokenizer::encode_part(const TextPart& part) const {
  auto memory = borrow();
  EncodedPart result;
  if (first_invalid_utf8(part.text) == part.text.npos) {
    result = std::move(Encoding(*this, part, *memory).result_);
  } else {
    // Where bytes are replaced, places are others: the caller replaces them first where it wants to cut.
    STRATA_CHECK(part.begins && part.ends);
    int64_t replaced = 0;
    const std::string text = with_replacement_characters(part.text, replaced);
    result = std::move(Encoding(*this, {.text = text}, *memory).result_);
  }
  give_back(std::move(memory));
  return result;
}

}  // namespace

std::unique_ptr<Tokenizer> parse_tokenizer_json(std::string_view text, const std::string& path) {
  const Json json = Json::parse(text, path);
  return std::make_unique<JsonTokenizer>(Field(json, path));
}

}  // namespace strata
