// Text to token ids and back: bytes, or a SentencePiece model.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace strata {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  virtual std::string decode(const std::vector<int32_t>& ids) const = 0;
  virtual int64_t vocabulary() const = 0;
};

std::unique_ptr<Tokenizer> byte_tokenizer();  // one id a byte, vocabulary 256
std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const std::string& model_path);  // Error when it is no model
// Trains a model of `vocabulary` pieces on text files and returns its bytes (to be written as a .model file).
std::string train_sentencepiece(const std::vector<std::string>& text_files, int64_t vocabulary);

// The tokenizer that `data prepare` left in a folder: tokenizer.model (SentencePiece), or bytes where tokenizer.txt says so.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& folder);

}  // namespace strata
