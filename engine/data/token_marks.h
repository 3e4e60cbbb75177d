// What may stand beside a token file NAME.bin: NAME.mask says which of its tokens count when they are predicted, and
// NAME.documents where its documents begin. `data prepare` writes them; both are little endian and begin with eight
// characters and the number of the file's tokens as an int64.
//
//     NAME.mask       "strmask1", tokens; then a bit a token, the lowest of a byte first (numpy.packbits with
//                     bitorder="little")
//     NAME.documents  "strdocs1", tokens; then an int64 a document: its first token, ascending from 0
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "memory/atomic_file.h"
#include "memory/mapped_file.h"

namespace strata {

// The name beside a token file, such as train_000.mask beside train_000.bin; `extension`: kMask or kDocuments.
inline constexpr const char *kMask = ".mask", *kDocuments = ".documents";
std::string name_beside(const std::string& token_file, const char* extension);

class LossMask {
 public:
  // Throws Error when it is none, or of another number of tokens than the `tokens` that `token_file` has.
  LossMask(const std::string& path, const std::string& token_file, int64_t tokens);
  bool counts(int64_t token) const { return int(bits()[token / 8]) >> (token % 8) & 1; }
  int64_t counted(int64_t first, int64_t count) const;  // of these tokens

 private:
  const std::byte* bits() const { return file_.bytes().data() + 16; }
  MappedFile file_;
};

class DocumentStarts {
 public:
  // Throws Error as LossMask does, and where they do not ascend from 0 to below `tokens`.
  DocumentStarts(const std::string& path, const std::string& token_file, int64_t tokens);
  std::span<const int64_t> all() const;

 private:
  MappedFile file_;
};

// Both, while a token file is written. A name appears when commit() is called for it.
class TokenMarksWriter {
 public:
  explicit TokenMarksWriter(const std::string& token_file);
  // Of the next tokens: whether they count, all alike or one by one.
  void append(int64_t count, bool counts);
  void append(std::span<const uint8_t> counts);
  void begin_document();  // with the next token; twice at the same place is once
  void commit();

 private:
  AtomicFile mask_, documents_;
  int64_t tokens_ = 0;
  std::vector<int64_t> starts_;
  std::vector<uint8_t> bytes_;  // of the mask, the last ones
};

}  // namespace strata
