// The one file that knows SentencePiece; see tokenizer.h.
#include "engine/data/tokenizer.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>

#include "engine/data/text_reader.h"
#include "strata/error.h"

namespace strata {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids(text.size());
    std::transform(text.begin(), text.end(), ids.begin(), [](unsigned char byte) { return int32_t(byte); });
    return ids;
  }
  std::string decode(const std::vector<int32_t>& ids) const override {
    std::string text;
    for (int32_t id : ids) {
      if (id < 0 || id > 255)
        throw Error("token " + std::to_string(id) + " is no byte; the tokens are not of the tokenizer \"bytes\".");
      text += char(id);
    }
    return text;
  }
  int64_t vocabulary() const override { return 256; }
};

// SentencePiece's messages are "Internal: ./src/file.cc(123) [condition] what happened."; only the last part helps.
std::string reason(const sentencepiece::util::Status& status) {
  std::string text = status.ToString();
  if (const size_t condition = text.rfind("] "); condition != text.npos) text.erase(0, condition + 2);
  while (!text.empty() && (text.back() == '.' || text.back() == ' ')) text.pop_back();
  return text;
}

// Why training failed, in terms of train:SIZE where the message has the number that would do.
std::string training_reason(const sentencepiece::util::Status& status) {
  const std::string text = reason(status);
  const auto number_after = [&](std::string_view mark) -> std::string {
    const size_t at = text.find(mark);
    if (at == text.npos) return "";
    const size_t begin = at + mark.size();
    return text.substr(begin, text.find_first_not_of("0123456789", begin) - begin);
  };
  if (const std::string most = number_after("set it to a value <= "); !most.empty())
    return "it has only " + most + "; use more text or at most train:" + most + ".";
  if (const std::string least = number_after(" vs "); text.find("smaller than required_chars") != text.npos)
    return "its characters, all bytes and three marks take " + least + " already; use at least train:" + least + ".";
  return text + ".";
}

class SentencePieceTokenizer final : public Tokenizer {
 public:
  explicit SentencePieceTokenizer(const std::string& path) {
    text_size(path);  // an Error when it cannot be read; SentencePiece prints one of its own
    if (!processor_.Load(path).ok())
      throw Error(path + ": is no SentencePiece model; name a .model file, \"bytes\" or \"train:SIZE\".");
    parts_are_alike_ = encodes_parts_alike();
  }
  std::vector<int32_t> encode(std::string_view text) const override {
    if (!parts_are_alike_) return encode_at_once(text);
    // SentencePiece keeps a queue of all the merges that it could do in a text: parts of some KiB stay in the caches
    // (4.2 against 1.3 MB/s for a text of 1 MiB).
    constexpr size_t kPart = 4096;  // bytes, and up to the next line
    std::vector<int32_t> ids;
    for (size_t begin = 0; begin < text.size();) {
      size_t end = begin + kPart < text.size() ? text.find('\n', begin + kPart) : text.npos;
      end = std::min(text.find_first_not_of('\n', end), text.size());
      const std::vector<int32_t> part = encode_at_once(text.substr(begin, end - begin));
      ids.insert(ids.end(), part.begin(), part.end());
      begin = end;
    }
    return ids;
  }
  std::string decode(const std::vector<int32_t>& ids) const override {
    for (int32_t id : ids)
      if (id < 0 || id >= vocabulary())
        throw Error("token " + std::to_string(id) + " is outside the tokenizer's vocabulary of " +
                    std::to_string(vocabulary()) + "; the tokens are of another tokenizer.");
    std::string text;
    if (const auto status = processor_.Decode(std::vector<int>(ids.begin(), ids.end()), &text); !status.ok())
      throw Error("SentencePiece cannot decode the tokens: " + reason(status) + ".");
    return text;
  }
  int64_t vocabulary() const override { return processor_.GetPieceSize(); }

 private:
  std::vector<int32_t> encode_at_once(std::string_view text) const {
    std::vector<int> ids;
    if (const auto status = processor_.Encode(text, &ids); !status.ok())
      throw Error("SentencePiece cannot encode the text: " + reason(status) + ".");
    return {ids.begin(), ids.end()};
  }
  // Is the text that ends before a line's start encoded as it is with that line after it? It is when no piece goes over
  // a line's start, and when normalization neither marks the start of a text nor drops spaces and line ends there.
  bool encodes_parts_alike() const {
    for (int id = 0; id < processor_.GetPieceSize(); ++id) {
      const std::string& piece = processor_.IdToPiece(id);
      const size_t newline = piece.find('\n');
      if (newline != piece.npos && piece.find_first_not_of('\n', newline) != piece.npos) return false;
    }
    const std::string first = " a  \n\n", second = "  b \n";
    std::vector<int32_t> parts = encode_at_once(first), more = encode_at_once(second);
    parts.insert(parts.end(), more.begin(), more.end());
    return parts == encode_at_once(first + second) && decode(parts) == first + second;
  }

  sentencepiece::SentencePieceProcessor processor_;
  bool parts_are_alike_ = false;
};

// Lines of text files for SentencePiece's trainer: of every line an equal chance, so that at most `most_bytes` of all
// the text are taken. Lines longer than the trainer takes are cut into several.
class Lines final : public sentencepiece::SentenceIterator {
 public:
  static constexpr size_t kLongest = 4000;  // bytes; the trainer skips what is above 4192

  Lines(const std::vector<std::string>& files, int64_t most_bytes) : files_(files) {
    int64_t total = 0;
    for (const std::string& file : files) total += text_size(file);
    share_ = std::min(1.0, double(most_bytes) / double(std::max<int64_t>(total, 1)));
    Next();
  }
  bool done() const override { return done_; }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }
  void Next() override {
    try {
      advance();
    } catch (...) {  // not through the library's frames
      problem_ = std::current_exception();
      done_ = true;
    }
  }
  void rethrow() const {
    if (problem_) std::rethrow_exception(problem_);
  }

 private:
  void advance() {
    while (take_line()) {
      owed_ += share_;
      if (owed_ < 1 || line_.empty()) continue;
      owed_ -= 1;
      return;
    }
    done_ = true;
  }
  // The next line, or the next piece of a long one, without its end; false when there is none.
  bool take_line() {
    while (at_ == piece_.size())
      if (!next_piece()) return false;
    size_t end = std::min(piece_.find('\n', at_), piece_.size());
    if (end - at_ > kLongest) {
      end = at_ + kLongest;
      while ((piece_[end] & 0xC0) == 0x80) --end;  // not inside a character
    }
    line_.assign(piece_, at_, end - at_);
    at_ = end < piece_.size() && piece_[end] == '\n' ? end + 1 : end;
    return true;
  }
  bool next_piece() {
    at_ = 0;
    for (;; reader_.reset(), ++file_) {
      if (file_ == files_.size()) return false;
      if (!reader_) reader_.emplace(files_[file_], 0, text_size(files_[file_]));
      const int64_t position = reader_->position();
      if (!reader_->next(piece_)) continue;
      require_utf8(piece_, files_[file_], position);
      return true;
    }
  }

  const std::vector<std::string>& files_;
  size_t file_ = 0;
  std::optional<TextReader> reader_;
  std::string piece_, line_;
  size_t at_ = 0;  // in piece_
  double share_ = 1, owed_ = 0;
  bool done_ = false;
  std::exception_ptr problem_;
};

}  // namespace

std::unique_ptr<Tokenizer> byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const std::string& model_path) {
  return std::make_unique<SentencePieceTokenizer>(model_path);
}

std::string train_sentencepiece(const std::vector<std::string>& text_files, int64_t vocabulary) {
  Lines lines(text_files, kTrainingText);
  lines.rethrow();
  std::string model;
  const auto status =
      sentencepiece::SentencePieceTrainer::Train({{"model_type", "bpe"},
                                                  {"vocab_size", std::to_string(vocabulary)},
                                                  {"byte_fallback", "true"},
                                                  {"character_coverage", "0.9995"},
                                                  // The text as it is: decoding gives it back.
                                                  {"normalization_rule_name", "identity"},
                                                  {"remove_extra_whitespaces", "false"},
                                                  {"add_dummy_prefix", "false"},
                                                  {"allow_whitespace_only_pieces", "true"},
                                                  // Its progress goes to stderr otherwise, some thousand lines of it.
                                                  {"minloglevel", "2"}},
                                                 &lines, &model);
  lines.rethrow();
  if (!status.ok())
    throw Error("SentencePiece cannot train " + std::to_string(vocabulary) +
                " pieces on this text: " + training_reason(status));
  return model;
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& folder) {
  const std::filesystem::path path(folder);
  const std::filesystem::path model = path / "tokenizer.model";
  if (std::filesystem::exists(model)) return sentencepiece_tokenizer(model.string());
  std::string kind;
  std::ifstream(path / "tokenizer.txt") >> kind;
  if (kind == "bytes") return byte_tokenizer();
  throw Error(folder +
              ": holds no tokenizer (tokenizer.model or tokenizer.txt, which strata data prepare writes); "
              "name its folder with --tokenizer.");
}

}  // namespace strata
