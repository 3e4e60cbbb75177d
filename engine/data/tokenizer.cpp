// The one file that knows SentencePiece; see tokenizer.h.
#include "engine/data/tokenizer.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <filesystem>
#include <fstream>

#include "strata/error.h"

namespace strata {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    for (unsigned char c : text) ids.push_back(c);
    return ids;
  }
  std::string decode(const std::vector<int32_t>& ids) const override {
    std::string text;
    for (int32_t id : ids) text += char(id);
    return text;
  }
  int64_t vocabulary() const override { return 256; }
};

class SentencePieceTokenizer final : public Tokenizer {
 public:
  explicit SentencePieceTokenizer(const std::string& path) {
    if (const auto status = processor_.Load(path); !status.ok()) throw Error(path + ": is no SentencePiece model: " + status.ToString() + ".");
  }
  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int> ids;
    if (const auto status = processor_.Encode(text, &ids); !status.ok()) throw Error("SentencePiece cannot encode the text: " + status.ToString() + ".");
    return {ids.begin(), ids.end()};
  }
  std::string decode(const std::vector<int32_t>& ids) const override {
    std::string text;
    if (const auto status = processor_.Decode(std::vector<int>(ids.begin(), ids.end()), &text); !status.ok())
      throw Error("SentencePiece cannot decode the tokens: " + status.ToString() + ".");
    return text;
  }
  int64_t vocabulary() const override { return processor_.GetPieceSize(); }

 private:
  sentencepiece::SentencePieceProcessor processor_;
};

}  // namespace

std::unique_ptr<Tokenizer> byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const std::string& path) { return std::make_unique<SentencePieceTokenizer>(path); }

std::string train_sentencepiece(const std::vector<std::string>& text_files, int64_t vocabulary) {
  std::string input;
  for (const std::string& file : text_files) {
    if (file.find(',') != std::string::npos) throw Error(file + ": SentencePiece cannot train on a file with a comma in its name; rename it.");
    input += (input.empty() ? "" : ",") + file;
  }
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(
      {{"input", input}, {"vocab_size", std::to_string(vocabulary)}, {"character_coverage", "0.9995"}, {"byte_fallback", "true"},
       {"model_type", "bpe"}, {"minloglevel", "2"}, {"input_sentence_size", "1000000"}, {"shuffle_input_sentence", "false"}},
      nullptr, &model);
  if (!status.ok()) throw Error("SentencePiece cannot train " + std::to_string(vocabulary) + " pieces on this text: " + status.ToString() + ".");
  return model;
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& folder) {
  const std::filesystem::path path(folder);
  if (std::filesystem::exists(path / "tokenizer.model")) return sentencepiece_tokenizer((path / "tokenizer.model").string());
  std::string kind;
  std::ifstream(path / "tokenizer.txt") >> kind;
  if (kind == "bytes") return byte_tokenizer();
  throw Error(folder + ": holds no tokenizer (tokenizer.model or tokenizer.txt, which strata data prepare writes); name its folder with --tokenizer.");
}

}  // namespace strata
