// Splits, encodes and writes; see prepare.h.
#include "engine/data/prepare.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>

#include "engine/data/token_file.h"
#include "engine/data/tokenizer.h"
#include "strata/error.h"

namespace strata {
namespace {

namespace fs = std::filesystem;

// Shards of one split: prefix_000.bin, prefix_001.bin, …
class Shards {
 public:
  Shards(fs::path folder, std::string prefix, bool wide, int64_t limit) : folder_(std::move(folder)), prefix_(std::move(prefix)), wide_(wide), limit_(limit) {}
  void append(const std::vector<int32_t>& ids) {
    for (size_t at = 0; at < ids.size();) {
      if (!writer_) {
        char name[64];
        std::snprintf(name, sizeof name, "_%03d.bin", int(files.size()));
        files.push_back((folder_ / (prefix_ + name)).string());
        writer_.emplace(files.back(), wide_);
      }
      const size_t count = std::min(ids.size() - at, size_t(limit_ - writer_->tokens()));
      writer_->append({ids.begin() + long(at), ids.begin() + long(at + count)});
      at += count;
      tokens += int64_t(count);
      if (writer_->tokens() == limit_) close();
    }
  }
  void close() {
    if (writer_) writer_->commit();
    writer_.reset();
  }
  std::vector<std::string> files;
  int64_t tokens = 0;

 private:
  fs::path folder_;
  std::string prefix_;
  bool wide_;
  int64_t limit_;
  std::optional<TokenFileWriter> writer_;
};

// Standard input goes to a temporary file, as its size decides the split.
class Spool {
 public:
  explicit Spool(const fs::path& folder) : path_((folder / (".stdin-" + std::to_string(::getpid()))).string()) {
    AtomicFile file(path_);
    std::vector<char> buffer(1 << 20);
    for (size_t n; (n = std::fread(buffer.data(), 1, buffer.size(), stdin)) > 0;) file.write(std::as_bytes(std::span(buffer.data(), n)));
    file.commit();
  }
  ~Spool() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::unique_ptr<Tokenizer> make_tokenizer(const PrepareArguments& arguments, const std::vector<std::string>& inputs) {
  const fs::path folder(arguments.output_directory);
  const std::string model = (folder / "tokenizer.model").string();
  if (arguments.tokenizer == "bytes") {
    AtomicFile file((folder / "tokenizer.txt").string());
    file.write(std::string("bytes\n"));
    file.commit();
    fs::remove(model);
    return byte_tokenizer();
  }
  std::string bytes;
  if (arguments.tokenizer.rfind("train:", 0) == 0) {
    char* end = nullptr;
    const long size = std::strtol(arguments.tokenizer.c_str() + 6, &end, 10);
    if (*end != '\0' || size < 2) throw Error("--tokenizer " + arguments.tokenizer + ": expected train:SIZE with a number of pieces, for example train:8000.");
    bytes = train_sentencepiece(inputs, size);
  } else {
    sentencepiece_tokenizer(arguments.tokenizer);  // refuses what is no model
    std::ifstream from(arguments.tokenizer, std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(from), {});
  }
  AtomicFile file(model);
  file.write(bytes);
  file.commit();
  return sentencepiece_tokenizer(model);
}

// Lines of a file up to `end`, in pieces of about a megabyte that end at a line's end where there is one.
template <class Use>
void read_pieces(std::ifstream& file, int64_t bytes, Use&& use) {
  constexpr int64_t kPiece = 1 << 20;
  std::string carried;
  while (bytes > 0) {
    std::string piece(size_t(std::min(bytes, kPiece)), '\0');
    file.read(piece.data(), std::streamsize(piece.size()));
    if (file.gcount() == 0) break;
    piece.resize(size_t(file.gcount()));
    bytes -= int64_t(piece.size());
    carried += piece;
    const size_t newline = bytes > 0 ? carried.rfind('\n') : carried.size() - 1;
    if (newline == std::string::npos) continue;
    use(carried.substr(0, newline + 1));
    carried.erase(0, newline + 1);
  }
  if (!carried.empty()) use(carried);
}

}  // namespace

PrepareResult prepare(const PrepareArguments& arguments) {
  if (!(arguments.validation_fraction >= 0 && arguments.validation_fraction < 1)) throw Error("--validation must be at least 0 and below 1.");
  if (arguments.shard_tokens < 2 || arguments.shard_tokens > INT32_MAX) throw Error("--shard-tokens must be 2 to 2147483647.");
  for (const std::string& input : arguments.inputs) {
    if (input == "-") continue;
    if (!fs::is_regular_file(input)) throw Error(input + ": is not a file that can be read.");
    if (fs::file_size(input) == 0) throw Error(input + ": is empty; there is nothing to prepare.");
  }
  std::error_code problem;
  fs::create_directories(arguments.output_directory, problem);
  if (problem) throw Error(arguments.output_directory + ": cannot make the folder: " + problem.message() + ".");
  std::optional<Spool> spool;
  std::vector<std::string> inputs = arguments.inputs;
  for (std::string& input : inputs)
    if (input == "-") {
      if (spool) throw Error("standard input (-) can be named once only.");
      spool.emplace(fs::path(arguments.output_directory));
      input = spool->path();
      if (fs::file_size(input) == 0) throw Error("standard input is empty; there is nothing to prepare.");
    }
  const auto tokenizer = make_tokenizer(arguments, inputs);
  PrepareResult result;
  result.vocabulary = tokenizer->vocabulary();
  const bool wide = result.vocabulary > 65536;
  Shards train(arguments.output_directory, "train", wide, arguments.shard_tokens), validation(arguments.output_directory, "validation", wide, arguments.shard_tokens);
  for (const std::string& input : inputs) {
    const int64_t size = int64_t(fs::file_size(input));
    const int64_t kept = int64_t(double(size) * arguments.validation_fraction);
    std::ifstream file(input, std::ios::binary);
    read_pieces(file, size - kept, [&](const std::string& text) { train.append(tokenizer->encode(text)); });
    read_pieces(file, kept, [&](const std::string& text) { validation.append(tokenizer->encode(text)); });
    if (file.bad()) throw Error(input + ": cannot be read to its end.", ExitCode::failed);
    result.text_bytes += size;
  }
  train.close();
  validation.close();
  result.train_tokens = train.tokens;
  result.validation_tokens = validation.tokens;
  result.files = train.files;
  result.files.insert(result.files.end(), validation.files.begin(), validation.files.end());
  return result;
}

}  // namespace strata
