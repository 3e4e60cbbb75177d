// Text to token ids and back: bytes, or a SentencePiece model.
// Not files of tokens (token_file.h); how a corpus goes through a tokenizer is prepare.h's.
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
  // Ids below vocabulary(). SentencePiece reads UTF-8 and takes what is not for U+FFFD. Any thread may call it.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // Throws Error for an id outside the vocabulary.
  virtual std::string decode(const std::vector<int32_t>& ids) const = 0;
  virtual int64_t vocabulary() const = 0;
};

std::unique_ptr<Tokenizer> byte_tokenizer();                                        // one id a byte, vocabulary 256
std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const std::string& model_path);  // Error when it is no model

// Trains a SentencePiece model of exactly `vocabulary` pieces on UTF-8 text files and returns its bytes, which make a
// .model file. Byte-pair encoding with byte fallback and without normalization, so that decoding gives the very text
// back, line ends and spaces included (but U+2581, SentencePiece's mark for a space, comes back as a space). Learns
// from at most kTrainingText bytes, taken line by line from all over the files, which bounds memory. The same text
// gives the same model. Throws Error when the text has too few pieces, or is not UTF-8.
std::string train_sentencepiece(const std::vector<std::string>& text_files, int64_t vocabulary);
inline constexpr int64_t kTrainingText = 64 << 20;

// The tokenizer that `data prepare` left in a folder: tokenizer.model (SentencePiece), or bytes where tokenizer.txt
// says so. Throws Error when there is none.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& folder);

}  // namespace strata
