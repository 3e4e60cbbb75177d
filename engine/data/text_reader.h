// Reads text files in pieces of bounded size that end where a line or at least a character ends, and says where a file
// is to be cut in two. Not tokens (tokenizer.h), and no decoding: text is UTF-8 bytes here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace strata {

class TextReader {
 public:
  // Bytes [begin, end) of a file. Throws Error when it cannot be opened.
  TextReader(const std::string& path, int64_t begin, int64_t end);
  ~TextReader();
  TextReader(const TextReader&) = delete;
  TextReader& operator=(const TextReader&) = delete;

  // Puts the next piece into `piece`; false at the end. At most kPiece bytes: up to the last line end in them, or where
  // there is none, up to the last whole character. Throws Error (failed) when the file cannot be read or has shrunk.
  bool next(std::string& piece);
  int64_t position() const { return position_; }  // in the file, of the byte after the last piece

  static constexpr int64_t kPiece = 1 << 20;  // bytes

 private:
  std::string path_;
  int file_ = -1;
  int64_t position_, end_;
};

// All of a file that is small.
std::string whole_text(const std::string& path);

// Size of a regular file in bytes. Throws Error when `path` is none or cannot be read.
int64_t text_size(const std::string& path);

// Where to cut a file so that about the last `fraction` of its bytes is the second part: after the first line end past
// that point, or, when there is none within 64 KiB or nothing after it, before a character. In [0, size].
int64_t cut_position(const std::string& path, int64_t size, double fraction);

// Offset of the first byte that begins no valid UTF-8 character (RFC 3629: no overlong forms, no surrogates, nothing
// above U+10FFFF, none cut off at the end), or npos.
size_t first_invalid_utf8(std::string_view text);
// Throws Error unless `text`, read from `path` at `position`, is valid UTF-8.
void require_utf8(std::string_view text, const std::string& path, int64_t position);

}  // namespace strata
