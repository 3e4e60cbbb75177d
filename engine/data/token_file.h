// Token files in llm.c's .bin format: 256 int32 of header, then uint16 (magic 20240520, version 1) or uint32 (magic
// 20240801, version 7) tokens, little endian. header[2] is the number of tokens.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "memory/atomic_file.h"
#include "memory/mapped_file.h"

namespace strata {

class TokenFile {
 public:
  explicit TokenFile(const std::string& path);  // throws Error when the file is not whole or not of this format
  int64_t tokens() const { return tokens_; }
  void read(int64_t offset, int64_t count, int32_t* out) const;
  int64_t first_at_least(int64_t vocabulary) const;  // index of the first token id outside the vocabulary, or -1

 private:
  MappedFile file_;
  int64_t tokens_ = 0;
  int width_ = 2;  // bytes of a token
};

// All token files of a data set, in the order named; patterns with * and ? give their matches sorted. Every token is
// checked once, when the set is opened (one pass over the files, about 1 s for 4 GB from the page cache).
class TokenDataset {
 public:
  TokenDataset(const std::vector<std::string>& patterns, int64_t vocabulary);
  const std::vector<TokenFile>& files() const { return files_; }
  int64_t tokens() const;

 private:
  std::vector<TokenFile> files_;
};

// Writes one file; nothing remains unless commit() is called.
class TokenFileWriter {
 public:
  TokenFileWriter(const std::string& path, bool wide);  // wide: uint32 tokens
  void append(const std::vector<int32_t>& tokens);
  int64_t tokens() const { return tokens_; }
  void commit();

 private:
  AtomicFile file_;
  bool wide_;
  int64_t tokens_ = 0;
};

}  // namespace strata
