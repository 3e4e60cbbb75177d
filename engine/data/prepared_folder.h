// What `strata data prepare` writes: a folder that is put into place as a whole, and the shards of a split in it.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/data/token_file.h"
#include "engine/data/token_marks.h"

namespace strata {

// The output directory, locked against other runs while this lives, with a folder aside that goes with it.
class PreparedFolder {
 public:
  explicit PreparedFolder(const std::string& directory);
  ~PreparedFolder();
  PreparedFolder(const PreparedFolder&) = delete;
  PreparedFolder& operator=(const PreparedFolder&) = delete;

  const std::filesystem::path& aside() const { return aside_; }

  // Puts the files named into place instead of an earlier run's. A kill between the moves leaves no mixture: the old
  // files are gone before the first new one comes. `names` must end with what shows that all is there.
  void publish(const std::vector<std::string>& names);

 private:
  std::filesystem::path directory_, aside_;
  int lock_ = -1;
  bool made_ = false, published_ = false;
};

// Shards of one split: prefix_000.bin, prefix_001.bin, …
class ShardWriter {
 public:
  ShardWriter(std::filesystem::path folder, std::string prefix, bool wide, int64_t limit, uint64_t tokenizer);

  // `counts`: of each token whether it counts; empty: they all do.
  void append(std::span<const int32_t> ids, std::span<const uint8_t> counts = {});
  void begin_document();
  void close();
  int64_t counted() const { return counted_; }
  int64_t documents() const { return documents_; }
  const std::vector<std::string>& names() const { return names_; }
  int64_t tokens() const { return tokens_; }

 private:
  std::filesystem::path folder_;
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

}  // namespace strata
