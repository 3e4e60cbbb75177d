// Splits, encodes and writes; see prepare.h.
#include "engine/data/prepare.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <thread>

#include "engine/data/text_reader.h"
#include "engine/data/token_file.h"
#include "engine/data/token_marks.h"
#include "engine/data/tokenizer.h"
#include "engine/data/tokenizer_json/unicode.h"
#include "memory/folder.h"
#include "strata/error.h"
#include "strata/json.h"
#include "strata/threads.h"

namespace strata {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const fs::path& path, const char* what, const std::error_code& problem) {
  throw Error(path.string() + ": " + what + ": " + problem.message() + ".", ExitCode::failed);
}

// Is this the name of a shard, such as train_000.bin, or of what stands beside one?
bool is_shard(const std::string& name) {
  const size_t digits = name.find('_') + 1;
  if (name.rfind("train_", 0) != 0 && name.rfind("validation_", 0) != 0) return false;
  const size_t dot = name.find_first_not_of("0123456789", digits);
  if (dot == name.npos || dot < digits + 3) return false;
  const std::string extension = name.substr(dot);
  return extension == ".bin" || extension == kMask || extension == kDocuments;
}

// The output directory, locked against other runs while this lives, with a folder aside that goes with it.
class Output {
 public:
  explicit Output(const std::string& directory) : directory_(directory), aside_(directory_ / ".preparing") {
    std::error_code problem;
    made_ = fs::create_directories(directory_, problem);
    if (problem) throw Error(directory + ": cannot make the folder: " + problem.message() + ".");
    lock_ = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock_ < 0) throw Error(directory + ": cannot open the folder: " + std::strerror(errno) + ".");
    if (flock(lock_, LOCK_EX | LOCK_NB) != 0) {
      const int reason = errno;
      close(lock_);
      if (reason == EWOULDBLOCK)
        throw Error(directory + ": another strata data prepare is writing there; wait for it or name another folder.",
                    ExitCode::failed);
      throw Error(directory + ": cannot lock the folder: " + std::strerror(reason) + ".", ExitCode::failed);
    }
    fs::remove_all(aside_, problem);  // of a run that was killed
    if (!problem) fs::create_directory(aside_, problem);
    if (problem) {
      close(lock_);
      refuse(aside_, "cannot make the folder", problem);
    }
  }
  ~Output() {
    remove_folder(aside_.c_str());  // where that fails, nothing more can be done; the next run tries again
    if (made_ && !published_) rmdir(directory_.c_str());
    close(lock_);
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  const fs::path& aside() const { return aside_; }

  // Puts the files named into place instead of an earlier run's. A kill between the moves leaves no mixture: the old
  // files are gone before the first new one comes. `names` must end with what shows that all is there.
  void publish(const std::vector<std::string>& names) {
    std::error_code problem;
    std::vector<fs::path> old{directory_ / "tokenizer.json", directory_ / "tokenizer.model",
                              directory_ / "tokenizer.txt"};
    for (const std::string& name : names_in(directory_, problem))
      if (is_shard(name)) old.push_back(directory_ / name);
    if (problem) refuse(directory_, "cannot list the folder", problem);
    for (const fs::path& path : old)
      if (fs::remove(path, problem); problem) refuse(path, "cannot remove it", problem);
    for (const std::string& name : names)
      if (fs::rename(aside_ / name, directory_ / name, problem); problem)
        refuse(directory_ / name, "cannot write it", problem);
    sync_folder(directory_.string());
    published_ = true;
  }

 private:
  fs::path directory_, aside_;
  int lock_ = -1;
  bool made_ = false, published_ = false;
};

// Shards of one split: prefix_000.bin, prefix_001.bin, …
class Shards {
 public:
  Shards(fs::path folder, std::string prefix, bool wide, int64_t limit, uint64_t tokenizer)
      : folder_(std::move(folder)), prefix_(std::move(prefix)), wide_(wide), limit_(limit), tokenizer_(tokenizer) {}

  // `counts`: of each token whether it counts; empty: they all do.
  void append(std::span<const int32_t> ids, std::span<const uint8_t> counts = {}) {
    while (!ids.empty()) {
      if (!writer_) {
        char number[32];
        std::snprintf(number, sizeof number, "_%03zu.bin", names_.size());
        names_.push_back(prefix_ + number);
        writer_.emplace((folder_ / names_.back()).string(), wide_, tokenizer_);
        marks_.emplace((folder_ / names_.back()).string());
      }
      if (begins_) marks_->begin_document();
      begins_ = false;
      const size_t count = std::min(ids.size(), size_t(limit_ - writer_->tokens()));
      writer_->append(ids.first(count));
      ids = ids.subspan(count);
      if (counts.empty()) {
        marks_->append(int64_t(count), true);
        counted_ += int64_t(count);
      } else {
        marks_->append(counts.first(count));
        counted_ +=
            std::count_if(counts.begin(), counts.begin() + int64_t(count), [](uint8_t one) { return one != 0; });
        counts = counts.subspan(count);
      }
      tokens_ += int64_t(count);
      if (writer_->tokens() == limit_) close();
    }
  }
  void begin_document() {
    begins_ = true;
    ++documents_;
  }
  void close() {
    if (!writer_) return;
    marks_->commit();
    writer_->commit();
    marks_.reset();
    writer_.reset();
  }
  int64_t counted() const { return counted_; }
  int64_t documents() const { return documents_; }
  const std::vector<std::string>& names() const { return names_; }
  int64_t tokens() const { return tokens_; }

 private:
  fs::path folder_;
  std::string prefix_;
  bool wide_;
  int64_t limit_;
  uint64_t tokenizer_;  // checksum
  std::vector<std::string> names_;
  int64_t tokens_ = 0, counted_ = 0, documents_ = 0;
  bool begins_ = false;  // the next token begins a document
  std::optional<TokenFileWriter> writer_;
  std::optional<TokenMarksWriter> marks_;
};

void copy_standard_input(const std::string& path) {
  AtomicFile file(path);
  std::vector<std::byte> buffer(1 << 20);
  for (;;) {
    const ssize_t count = ::read(STDIN_FILENO, buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw Error(std::string("standard input cannot be read: ") + std::strerror(errno) + ".");
    if (count == 0) break;
    file.write(std::span(buffer).first(size_t(count)));
  }
  file.commit();
}

struct Input {
  std::string path;
  std::string name;  // for messages
  int64_t size = 0;  // bytes
};

void require_text(const Input& input) {
  if (input.size == 0) throw Error(input.name + ": is empty; there is nothing to prepare.");
}

// Files are looked at before anything is written; standard input comes later.
std::vector<Input> look_at(const std::vector<std::string>& paths) {
  if (paths.empty()) throw Error("no text is named; name text files, or - for standard input.");
  if (std::count(paths.begin(), paths.end(), "-") > 1) throw Error("standard input (-) is named more than once.");
  std::vector<Input> inputs;
  for (const std::string& path : paths) {
    if (path == "-") {
      inputs.push_back({"", "standard input", 0});
      continue;
    }
    inputs.push_back({path, path, text_size(path)});
    require_text(inputs.back());
  }
  return inputs;
}

void write_text(const fs::path& path, const std::string& content) {
  AtomicFile file(path.string());
  file.write(content);
  file.commit();
}

bool has_json_lines(const Input& input) { return input.name.ends_with(".jsonl"); }

// Where the second part of a file of lines begins: after the first line end past all but the last `fraction` of it.
int64_t line_cut(const std::string& path, int64_t size, double fraction) {
  TextReader reader(path, size - int64_t(double(size) * fraction), size);
  std::string piece;
  for (int64_t at = reader.position(); reader.next(piece); at = reader.position())
    if (const size_t end = piece.find('\n'); end != piece.npos) return at + int64_t(end) + 1;
  return size;
}

// The lines of part of a file, of any length, and where each begins.
class LineReader {
 public:
  LineReader(const std::string& path, int64_t begin, int64_t end) : reader_(path, begin, end), line_begin_(begin) {}
  bool next(std::string& line, int64_t& position) {
    line.clear();
    position = line_begin_;
    for (;;) {
      const size_t end = piece_.find('\n', at_);
      line.append(piece_, at_, end - at_);
      if (end != piece_.npos) {
        at_ = end + 1;
        line_begin_ += int64_t(line.size()) + 1;
        return true;
      }
      at_ = 0;
      if (reader_.next(piece_)) continue;
      piece_.clear();
      line_begin_ += int64_t(line.size());
      return !line.empty();
    }
  }
  int64_t position() const { return line_begin_; }

 private:
  TextReader reader_;
  std::string piece_;
  size_t at_ = 0;  // in it
  int64_t line_begin_;
};

struct LineDocument {
  std::string text;
  bool conversation;  // its template has written what begins and ends it
  std::vector<Rendered::Part> said{};
};

// Makes documents of lines; the chat template is looked for when the first line with messages comes.
class LineDocuments {
 public:
  LineDocuments(std::string tokenizer, TrainOn train_on) : tokenizer_(std::move(tokenizer)), train_on_(train_on) {}
  LineDocument of(const std::string& line, const std::string& place) {
    const Json json = Json::parse(line, place);
    if (json.find("messages")) {
      Rendered rendered = chat_template(place).render(line, place);
      return {std::move(rendered.text), true, std::move(rendered.said)};
    }
    const Json* text = json.find("text");
    if (!text) throw Error(place + ": has neither \"messages\" nor \"text\"; each line must be an object with one.");
    return {text->string(place + ": text"), false, {}};
  }

 private:
  ChatTemplate& chat_template(const std::string& place) {
    if (!fs::is_directory(tokenizer_))
      throw Error(place + ": has messages, which need a chat template; name a model's folder with --tokenizer.");
    if (!template_) template_ = std::make_unique<ChatTemplate>(tokenizer_, train_on_);
    return *template_;
  }
  std::string tokenizer_;  // as named
  TrainOn train_on_;
  std::unique_ptr<ChatTemplate> template_;
};

// What is done with bytes that are no UTF-8.
enum class BrokenText { taken, refused, replaced };

struct Made {
  std::unique_ptr<Tokenizer> tokenizer;
  std::string name;  // of its file
  BrokenText broken_text;
};

// Makes the tokenizer and writes into `folder` what load_tokenizer needs.
Made make_tokenizer(const std::string& wanted, const std::vector<Input>& inputs, const fs::path& folder) {
  const std::string file = fs::is_directory(wanted) ? tokenizer_file(wanted) : wanted;
  if (wanted == "bytes" || file.ends_with("tokenizer.txt")) {
    if (wanted != "bytes") load_tokenizer(wanted);  // says what is wrong with it
    write_text(folder / "tokenizer.txt", "bytes\n");
    return {byte_tokenizer(), "tokenizer.txt", BrokenText::taken};
  }
  if (file.ends_with(".json")) {
    auto tokenizer = json_tokenizer(file);
    write_text(folder / "tokenizer.json", whole_text(file));
    return {std::move(tokenizer), "tokenizer.json", BrokenText::replaced};
  }
  const std::string model = (folder / "tokenizer.model").string();
  if (wanted.rfind("train:", 0) == 0) {
    int64_t size = 0;
    const char* end = wanted.data() + wanted.size();
    const auto [stop, problem] = std::from_chars(wanted.data() + 6, end, size);
    if (problem != std::errc() || stop != end || size < 1 || size > INT32_MAX)
      throw Error("--tokenizer " + wanted + ": expected train:SIZE with a number of pieces, for example train:8000.");
    std::vector<std::string> paths;
    for (const Input& input : inputs) {
      if (has_json_lines(input))
        throw Error(input.name + ": --tokenizer train:SIZE learns from text files; train it on those first.");
      paths.push_back(input.path);
    }
    write_text(model, train_sentencepiece(paths, size));
  } else {
    sentencepiece_tokenizer(file);  // refuses what is no model
    write_text(model, whole_text(file));
  }
  return {sentencepiece_tokenizer(model), "tokenizer.model", BrokenText::refused};
}

// A document of any length in pieces, each encoded with some text after it. Where two of them have a cut in common, the
// tokens before it are the first one's and those after it the second's: so the tokens are those of the whole. Two
// without become one piece.
class Document {
 public:
  struct Piece {
    std::string text{};
    int64_t bytes = 0;  // of the file
    bool begins = false, ends = false;
    std::optional<EncodedPart> encoded{};
  };
  bool ended() const { return !pieces_.empty() && pieces_.back().ends; }
  void add(Piece piece) { pieces_.push_back(std::move(piece)); }

  // Those that can be encoded and are not yet.
  std::vector<size_t> to_encode() const {
    std::vector<size_t> all;
    for (size_t i = 0; i < pieces_.size(); ++i)
      if (!pieces_[i].encoded && (pieces_[i].ends || i + 1 < pieces_.size())) all.push_back(i);
    return all;
  }
  void encode(size_t i, const Tokenizer& tokenizer) {
    Piece& piece = pieces_[i];
    std::string text = piece.text;
    if (!piece.ends) text += pieces_[i + 1].text.substr(0, text_after(pieces_[i + 1].text));
    piece.encoded =
        tokenizer.encode_part({.text = text, .own = piece.text.size(), .begins = piece.begins, .ends = piece.ends});
  }
  // Tells tokens, and the bytes of the file that they are for, as far as they are known. True when that is all.
  template <class Tell>
  bool write(Tell&& tell) {
    while (!pieces_.empty() && pieces_[0].encoded) {
      const Piece& first = pieces_[0];
      const std::span<const int32_t> ids(first.encoded->ids);
      const size_t from = taken_ == 0 ? 0 : cut_at(first, taken_)->token;
      if (first.ends) {
        tell(ids.subspan(from), first.bytes);
        return true;
      }
      if (!pieces_[1].encoded) return false;
      if (const auto cut = common_cut()) {
        tell(ids.subspan(from, cut->token - from), first.bytes);
        taken_ = cut->byte - first.text.size();
        pieces_.erase(pieces_.begin());
      } else {
        join();
      }
    }
    return false;
  }

 private:
  // Bytes of the next piece that are looked at: up to a whole character.
  static size_t text_after(std::string_view text) {
    size_t size = std::min(TextPart::kAfter, text.size());
    while (size < text.size() && size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;
    return size;
  }
  static const EncodedPart::Cut* cut_at(const Piece& piece, size_t byte) {
    const auto& cuts = piece.encoded->cuts;
    const auto found = std::partition_point(cuts.begin(), cuts.end(), [&](const auto& cut) { return cut.byte < byte; });
    return found != cuts.end() && found->byte == byte ? &*found : nullptr;
  }
  std::optional<EncodedPart::Cut> common_cut() const {
    const size_t size = pieces_[0].text.size();
    for (const EncodedPart::Cut& cut : pieces_[0].encoded->cuts)
      if (cut.byte > size && cut.byte >= taken_ && cut_at(pieces_[1], cut.byte - size)) return cut;
    return {};
  }
  void join() {
    pieces_[0].text += pieces_[1].text;
    pieces_[0].bytes += pieces_[1].bytes;
    pieces_[0].ends = pieces_[1].ends;
    pieces_[0].encoded.reset();
    pieces_.erase(pieces_.begin() + 1);
  }

  std::vector<Piece> pieces_;
  size_t taken_ = 0;  // bytes of the first piece whose tokens are told
};

// Encodes text on all cores, a piece of it on each.
class Encoder {
 public:
  using Done = std::function<void(int64_t bytes)>;
  Encoder(const Made& made, const PrepareArguments& arguments, Done done)
      : tokenizer_(*made.tokenizer),
        documents_(arguments.tokenizer, arguments.train_on),
        begin_(tokenizer_.document_begin()),
        end_(arguments.document_end.empty() ? tokenizer_.document_end() : tokenizer_.encode(arguments.document_end)),
        train_on_(arguments.train_on),
        broken_text_(made.broken_text),
        done_(std::move(done)),
        threads_(int(std::max(1u, std::thread::hardware_concurrency()))) {
    const std::string& document_end = arguments.document_end;
    if (!document_end.empty()) conversation_end_ = end_;
    if (!document_end.empty() && end_.size() != 1)
      throw Error("--document-end " + document_end + ": is " + std::to_string(end_.size()) +
                  " tokens; name one, such as <|endoftext|>.");
  }

  // Appends the tokens of bytes [begin, end) of an input: a document, or one in each line.
  void encode(const Input& input, int64_t begin, int64_t end, Shards& to) {
    if (begin == end) return;
    if (has_json_lines(input)) return encode_lines(input, begin, end, to);
    to.begin_document();
    to.append(begin_);
    TextReader reader(input.path, begin, end);
    Document document;
    do {
      while (!document.ended() && document.to_encode().size() < size_t(threads_.count()))
        document.add(read_piece(reader, input, begin, end));
      const std::vector<size_t> all = document.to_encode();
      threads_.each(int64_t(all.size()), [&](int64_t i) { document.encode(all[size_t(i)], tokenizer_); });
    } while (!document.write([&](std::span<const int32_t> ids, int64_t bytes) {
      to.append(ids);
      done_(bytes);
    }));
    to.append(end_);
  }
  int64_t replaced() const { return replaced_; }
  bool masked() const { return masked_; }  // some conversation was written of which only parts count

 private:
  void encode_lines(const Input& input, int64_t begin, int64_t end, Shards& to) {
    LineReader reader(input.path, begin, end);
    if (begin == 0) lines_ = 0;
    std::vector<LineDocument> documents;
    std::vector<EncodedPart> encoded;
    std::string line;
    for (bool more = true; more;) {
      const int64_t from = reader.position();
      documents.clear();
      for (int64_t at = from; at - from < TextReader::kPiece * threads_.count();) {
        more = reader.next(line, at);
        if (!more) break;
        ++lines_;
        if (line.find_first_not_of(" \t\r") != line.npos)
          documents.push_back(documents_.of(line, input.name + ":" + std::to_string(lines_)));
      }
      encoded.resize(documents.size());
      threads_.each(int64_t(encoded.size()), [&](int64_t i) {
        const LineDocument& document = documents[size_t(i)];
        encoded[size_t(i)] =
            tokenizer_.encode_part({.text = document.text, .places = document.conversation && learns_parts()});
      });
      for (size_t i = 0; i < encoded.size(); ++i) {
        to.begin_document();
        documents[i].conversation ? write_conversation(documents[i], encoded[i], to) : write_text(encoded[i].ids, to);
      }
      if (reader.position() > from) done_(reader.position() - from);
    }
  }
  bool learns_parts() const { return train_on_ == TrainOn::assistant; }
  void write_text(std::span<const int32_t> ids, Shards& to) const {
    to.append(begin_);
    to.append(ids);
    to.append(end_);
  }
  void write_conversation(const LineDocument& document, const EncodedPart& encoded, Shards& to) {
    const std::span<const int32_t> ids(encoded.ids);
    if (!learns_parts()) {
      to.append(ids);
      return to.append(conversation_end_);
    }
    masked_ = true;
    std::vector<uint8_t> counts(ids.size(), 0);
    for (size_t i = 0; i < ids.size(); ++i) {
      const size_t begin = encoded.begins[i],
                   end = std::max(begin + 1, i + 1 < ids.size() ? encoded.begins[i + 1] : document.text.size());
      for (const Rendered::Part& said : document.said) counts[i] |= begin < said.end && end > said.begin;
    }
    to.append(ids, counts);
    to.append(conversation_end_, std::vector<uint8_t>(conversation_end_.size(), 0));
  }
  Document::Piece read_piece(TextReader& reader, const Input& input, int64_t begin, int64_t end) {
    const int64_t position = reader.position();
    Document::Piece piece{.begins = position == begin};
    STRATA_CHECK(reader.next(piece.text));
    piece.bytes = int64_t(piece.text.size());
    piece.ends = reader.position() == end;
    if (broken_text_ == BrokenText::refused) require_utf8(piece.text, input.name, position);
    if (broken_text_ == BrokenText::replaced && first_invalid_utf8(piece.text) != piece.text.npos)
      piece.text = with_replacement_characters(piece.text, replaced_);
    return piece;
  }

  const Tokenizer& tokenizer_;
  LineDocuments documents_;
  int64_t lines_ = 0;                                    // of the input, so far
  std::vector<int32_t> begin_, end_, conversation_end_;  // around each document
  TrainOn train_on_;
  bool masked_ = false;
  BrokenText broken_text_;
  Done done_;
  Threads threads_;
  int64_t replaced_ = 0;
};

void check(const PrepareArguments& arguments) {
  if (!(arguments.validation_fraction >= 0 && arguments.validation_fraction < 1))
    throw Error("--validation must be at least 0 and below 1; it is the share of the text kept for validation.");
  if (arguments.shard_tokens < 2 || arguments.shard_tokens > TokenFileWriter::kMostTokens)
    throw Error("--shard-tokens must be 2 to " + std::to_string(TokenFileWriter::kMostTokens) + ".");
  if (arguments.output_directory.empty()) throw Error("--output must name a folder.");
}

}  // namespace

PrepareResult prepare(const PrepareArguments& arguments) {
  check(arguments);
  std::vector<Input> inputs = look_at(arguments.inputs);
  Output output(arguments.output_directory);
  for (Input& input : inputs)
    if (input.path.empty()) {
      input.path = (output.aside() / "standard_input").string();
      copy_standard_input(input.path);
      input.size = text_size(input.path);
      require_text(input);
    }
  PrepareResult result;
  for (const Input& input : inputs) result.text_bytes += input.size;

  const Made made = make_tokenizer(arguments.tokenizer, inputs, output.aside());
  result.vocabulary = made.tokenizer->vocabulary();
  const bool wide = result.vocabulary > 65536;
  const uint64_t checksum = tokenizer_checksum((output.aside() / made.name).string());
  Shards train(output.aside(), "train", wide, arguments.shard_tokens, checksum);
  Shards validation(output.aside(), "validation", wide, arguments.shard_tokens, checksum);
  int64_t bytes = 0;
  Encoder encoder(made, arguments, [&](int64_t more) {
    bytes += more;
    if (arguments.progress) arguments.progress(bytes, result.text_bytes);
  });
  for (const Input& input : inputs) {
    const int64_t cut =
        (has_json_lines(input) ? line_cut : cut_position)(input.path, input.size, arguments.validation_fraction);
    encoder.encode(input, 0, cut, train);
    encoder.encode(input, cut, input.size, validation);
  }
  train.close();
  validation.close();
  result.replaced = encoder.replaced();
  result.train_tokens = train.tokens();
  result.validation_tokens = validation.tokens();

  result.masked = encoder.masked();
  for (const Shards* shards : {&train, &validation})
    result.counted += shards->counted(), result.documents += shards->documents();

  std::vector<std::string> order;
  const auto publish = [&](const std::string& name) {
    if (result.masked) order.push_back(name_beside(name, kMask));
    for (const std::string& one : {name_beside(name, kDocuments), name}) order.push_back(one);
  };
  for (const std::string& name : validation.names()) publish(name);
  order.push_back(made.name);
  std::for_each(train.names().rbegin(), train.names().rend(), publish);
  output.publish(order);
  for (const Shards* shards : {&train, &validation})
    for (const std::string& name : shards->names())
      result.files.push_back((fs::path(arguments.output_directory) / name).string());
  return result;
}

}  // namespace strata
