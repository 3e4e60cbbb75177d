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
#include <thread>

#include "engine/data/text_reader.h"
#include "engine/data/token_file.h"
#include "engine/data/tokenizer.h"
#include "strata/error.h"
#include "strata/threads.h"

namespace strata {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const fs::path& path, const char* what, const std::error_code& problem) {
  throw Error(path.string() + ": " + what + ": " + problem.message() + ".", ExitCode::failed);
}

// Is this the name of a shard, such as train_000.bin?
bool is_shard(const std::string& name) {
  const size_t digits = name.find('_') + 1;
  if (name.rfind("train_", 0) != 0 && name.rfind("validation_", 0) != 0) return false;
  const size_t dot = name.find_first_not_of("0123456789", digits);
  return dot != name.npos && dot >= digits + 3 && name.substr(dot) == ".bin";
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
    std::error_code ignored;  // nothing more can be done; the next run tries again
    fs::remove_all(aside_, ignored);
    if (made_ && !published_) fs::remove(directory_, ignored);
    close(lock_);
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  const fs::path& aside() const { return aside_; }

  // Puts the files named into place instead of an earlier run's. A kill between the moves leaves no mixture: the old
  // files are gone before the first new one comes. `names` must end with what shows that all is there.
  void publish(const std::vector<std::string>& names) {
    std::error_code problem;
    std::vector<fs::path> old{directory_ / "tokenizer.model", directory_ / "tokenizer.txt"};
    for (fs::directory_iterator entry(directory_, problem), end; !problem && entry != end; entry.increment(problem))
      if (is_shard(entry->path().filename().string())) old.push_back(entry->path());
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
  Shards(fs::path folder, std::string prefix, bool wide, int64_t limit)
      : folder_(std::move(folder)), prefix_(std::move(prefix)), wide_(wide), limit_(limit) {}

  void append(std::span<const int32_t> ids) {
    while (!ids.empty()) {
      if (!writer_) {
        char number[32];
        std::snprintf(number, sizeof number, "_%03zu.bin", names_.size());
        names_.push_back(prefix_ + number);
        writer_.emplace((folder_ / names_.back()).string(), wide_);
      }
      const size_t count = std::min(ids.size(), size_t(limit_ - writer_->tokens()));
      writer_->append(ids.first(count));
      ids = ids.subspan(count);
      tokens_ += int64_t(count);
      if (writer_->tokens() == limit_) close();
    }
  }
  void close() {
    if (writer_) writer_->commit();
    writer_.reset();
  }
  const std::vector<std::string>& names() const { return names_; }
  int64_t tokens() const { return tokens_; }

 private:
  fs::path folder_;
  std::string prefix_;
  bool wide_;
  int64_t limit_;
  std::vector<std::string> names_;
  int64_t tokens_ = 0;
  std::optional<TokenFileWriter> writer_;
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

std::string whole_file(const std::string& path) {
  std::string content, piece;
  for (TextReader reader(path, 0, text_size(path)); reader.next(piece);) content += piece;
  return content;
}

struct Made {
  std::unique_ptr<Tokenizer> tokenizer;
  std::string name;  // of its file
};

// Makes the tokenizer and writes into `folder` what load_tokenizer needs.
Made make_tokenizer(const std::string& wanted, const std::vector<Input>& inputs, const fs::path& folder) {
  if (wanted == "bytes") {
    write_text(folder / "tokenizer.txt", "bytes\n");
    return {byte_tokenizer(), "tokenizer.txt"};
  }
  const std::string model = (folder / "tokenizer.model").string();
  if (wanted.rfind("train:", 0) == 0) {
    int64_t size = 0;
    const char* end = wanted.data() + wanted.size();
    const auto [stop, problem] = std::from_chars(wanted.data() + 6, end, size);
    if (problem != std::errc() || stop != end || size < 1 || size > INT32_MAX)
      throw Error("--tokenizer " + wanted + ": expected train:SIZE with a number of pieces, for example train:8000.");
    std::vector<std::string> paths;
    for (const Input& input : inputs) paths.push_back(input.path);
    write_text(model, train_sentencepiece(paths, size));
  } else {
    sentencepiece_tokenizer(wanted);  // refuses what is no model
    write_text(model, whole_file(wanted));
  }
  return {sentencepiece_tokenizer(model), "tokenizer.model"};
}

// Encodes text on all cores, a piece of it on each.
class Encoder {
 public:
  using Done = std::function<void(int64_t bytes)>;
  Encoder(const Tokenizer& tokenizer, bool needs_utf8, Done done)
      : tokenizer_(tokenizer),
        needs_utf8_(needs_utf8),
        done_(std::move(done)),
        threads_(int(std::max(1u, std::thread::hardware_concurrency()))) {}

  // Appends the tokens of bytes [begin, end) of an input.
  void encode(const Input& input, int64_t begin, int64_t end, Shards& to) {
    TextReader reader(input.path, begin, end);
    std::vector<std::string> pieces(static_cast<size_t>(threads_.count()));
    std::vector<std::vector<int32_t>> ids(pieces.size());
    for (bool more = true; more;) {
      size_t count = 0;
      for (int64_t position = reader.position(); count < pieces.size(); position = reader.position(), ++count) {
        more = reader.next(pieces[count]);
        if (!more) break;
        if (needs_utf8_) require_utf8(pieces[count], input.name, position);
      }
      threads_.each(int64_t(count), [&](int64_t i) { ids[size_t(i)] = tokenizer_.encode(pieces[size_t(i)]); });
      for (size_t i = 0; i < count; ++i) {
        to.append(ids[i]);
        done_(int64_t(pieces[i].size()));
      }
    }
  }

 private:
  const Tokenizer& tokenizer_;
  bool needs_utf8_;
  Done done_;
  Threads threads_;
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
  Shards train(output.aside(), "train", wide, arguments.shard_tokens);
  Shards validation(output.aside(), "validation", wide, arguments.shard_tokens);
  int64_t bytes = 0;
  Encoder encoder(*made.tokenizer, arguments.tokenizer != "bytes", [&](int64_t more) {
    bytes += more;
    if (arguments.progress) arguments.progress(bytes, result.text_bytes);
  });
  for (const Input& input : inputs) {
    const int64_t cut = cut_position(input.path, input.size, arguments.validation_fraction);
    encoder.encode(input, 0, cut, train);
    encoder.encode(input, cut, input.size, validation);
  }
  train.close();
  validation.close();
  result.train_tokens = train.tokens();
  result.validation_tokens = validation.tokens();

  std::vector<std::string> order = validation.names();
  order.push_back(made.name);
  order.insert(order.end(), train.names().rbegin(), train.names().rend());
  output.publish(order);
  for (const Shards* shards : {&train, &validation})
    for (const std::string& name : shards->names())
      result.files.push_back((fs::path(arguments.output_directory) / name).string());
  return result;
}

}  // namespace strata
