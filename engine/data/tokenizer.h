// Text to token ids and back: bytes, a SentencePiece model, or a Hugging Face tokenizer.json (tokenizer_json/).
// Not files of tokens (token_file.h); how a corpus goes through a tokenizer is prepare.h's.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace strata {

// A part of a document and some text after it, which lets its last tokens be what they are in the document.
struct TextPart {
  static constexpr size_t kMargin = 4096;  // bytes in which places are looked for where two parts can be joined
  static constexpr size_t kAfter = 2 * kMargin;

  std::string_view text{};
  size_t own = std::string_view::npos;  // bytes; what follows is the next part's
  bool begins = true, ends = true;      // the document's begin and end are this text's
  bool places = false;                  // EncodedPart::begins is wanted

  bool wants_cut(size_t byte) const { return (byte > 0 && byte < kMargin) || (byte >= own && byte < own + kMargin); }
};
// Its tokens, and places where the text could be cut without changing a token: those before are the document's where
// they begin at such a place, whatever comes after it, and those after it, whatever comes before.
struct EncodedPart {
  struct Cut {
    size_t byte, token;
  };
  std::vector<int32_t> ids{};
  std::vector<Cut> cuts{};  // rising; those that TextPart::wants_cut asks for
  // Byte of the text where each token begins, not falling, if it is asked for. A token that is part of a character, or
  // of what normalization made, begins where that does or where the token before it does.
  std::vector<size_t> begins{};
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // Ids below vocabulary(). What is no UTF-8 is taken for U+FFFD, but by "bytes". Any thread may call it.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // The text must be UTF-8 (any, for bytes) unless it is a whole document.
  virtual EncodedPart encode_part(const TextPart& part) const = 0;
  // Throws Error for an id that it does not know.
  virtual std::string decode(const std::vector<int32_t>& ids) const = 0;
  virtual int64_t vocabulary() const = 0;
  virtual bool knows(int32_t id) const { return id >= 0 && id < vocabulary(); }
  // The tokens that the model wants around each document.
  virtual std::vector<int32_t> document_begin() const { return {}; }
  virtual std::vector<int32_t> document_end() const { return {}; }
};

// The text of `ids` where they follow `before`, whose text does not come again; ids that are unknown are shown as
// "<unknown id 7>".
std::string decode_after(const Tokenizer& tokenizer, const std::vector<int32_t>& before,
                         const std::vector<int32_t>& ids);

std::unique_ptr<Tokenizer> byte_tokenizer();                                        // one id a byte, vocabulary 256
std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const std::string& model_path);  // Error when it is no model

// Trains a SentencePiece model of exactly `vocabulary` pieces on UTF-8 text files and returns its bytes, which make a
// .model file. Byte-pair encoding with byte fallback and without normalization, so that decoding gives the very text
// back, line ends and spaces included (but U+2581, SentencePiece's mark for a space, comes back as a space). Learns
// from at most kTrainingText bytes, taken line by line from all over the files, which bounds memory. The same text
// gives the same model. Throws Error when the text has too few pieces, or is not UTF-8.
std::string train_sentencepiece(const std::vector<std::string>& text_files, int64_t vocabulary);
inline constexpr int64_t kTrainingText = 64 << 20;

std::unique_ptr<Tokenizer> json_tokenizer(const std::string& path);  // Error with the field that is not supported

// The tokenizer of a folder, such as `data prepare` left or Hugging Face publishes: tokenizer.json, tokenizer.model
// (SentencePiece), or bytes where tokenizer.txt says so. Throws Error when there is none.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& folder);
// Its file.
std::string tokenizer_file(const std::string& folder);
// XXH3 of a tokenizer's file, never 0: token files keep it, so that they go with their tokenizer only.
uint64_t tokenizer_checksum(const std::string& file);

}  // namespace strata
