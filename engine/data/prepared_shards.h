// What `strata data prepare` writes: the shards of a split.
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

// Whether a file in a folder is one of those that prepare writes: a shard such as train_000.bin, what stands beside
// one, a tokenizer.
bool is_prepared(const std::string& name);

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
