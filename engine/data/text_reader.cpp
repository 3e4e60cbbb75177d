// Reading text with read(2); see text_reader.h.
#include "engine/data/text_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "strata/error.h"

namespace strata {
namespace {

bool continues_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

// Bytes of the character that begins with `byte`; 0 when none does.
size_t character_bytes(unsigned char byte) {
  if (byte < 0x80) return 1;
  if (byte < 0xC2) return 0;  // continuations, and C0 and C1, which begin only overlong forms
  if (byte < 0xE0) return 2;
  if (byte < 0xF0) return 3;
  return byte < 0xF5 ? 4 : 0;
}

// How many bytes of `text` to take so that it ends with a line or else with a whole character; all, if need be.
size_t whole_part(std::string_view text) {
  if (const size_t newline = text.rfind('\n'); newline != text.npos) return newline + 1;
  size_t last = text.size() - 1;  // where the last character begins
  while (last > 0 && text.size() - last < 4 && continues_character(text[last])) --last;
  const bool whole = last + character_bytes(static_cast<unsigned char>(text[last])) <= text.size();
  return whole || last == 0 ? text.size() : last;
}

}  // namespace

TextReader::TextReader(const std::string& path, int64_t begin, int64_t end) : path_(path), position_(begin), end_(end) {
  file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file_ < 0) throw Error(path + ": cannot read it: " + std::strerror(errno) + ".");
}

TextReader::~TextReader() { close(file_); }

bool TextReader::next(std::string& piece) {
  const size_t wanted = size_t(std::min(kPiece, end_ - position_));
  piece.resize(wanted);
  for (size_t got = 0; got < wanted;) {
    const ssize_t count = pread(file_, piece.data() + got, wanted - got, off_t(position_ + int64_t(got)));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw Error(path_ + ": cannot read it: " + std::strerror(errno) + ".", ExitCode::failed);
    if (count == 0)
      throw Error(path_ + ": became shorter while it was read; try again when nothing writes to it.", ExitCode::failed);
    got += size_t(count);
  }
  if (position_ + int64_t(wanted) < end_) piece.resize(whole_part(piece));
  position_ += int64_t(piece.size());
  return wanted > 0;
}

std::string whole_text(const std::string& path) {
  std::string content, piece;
  for (TextReader reader(path, 0, text_size(path)); reader.next(piece);) content += piece;
  return content;
}

int64_t text_size(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) throw Error(path + ": cannot read it: " + std::strerror(errno) + ".");
  if (!S_ISREG(status.st_mode)) throw Error(path + ": is not a regular file.");
  TextReader(path, 0, 0);  // may it be opened?
  return status.st_size;
}

int64_t cut_position(const std::string& path, int64_t size, double fraction) {
  constexpr int64_t kLook = 1 << 16;
  const int64_t from = size - int64_t(double(size) * fraction);
  std::string text;
  TextReader(path, from, std::min(size, from + kLook)).next(text);
  if (const size_t newline = text.find('\n'); newline != text.npos && from + int64_t(newline) + 1 < size)
    return from + int64_t(newline) + 1;
  int64_t skip = 0;  // a character has at most three bytes after its first
  while (skip < 3 && skip < int64_t(text.size()) && continues_character(text[size_t(skip)])) ++skip;
  return from + skip;
}

size_t first_invalid_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t k) { return static_cast<unsigned char>(text[i + k]); };
    const size_t n = character_bytes(byte(0));
    if (n == 0 || n > text.size() - i) return i;
    for (size_t k = 1; k < n; ++k)
      if (!continues_character(text[i + k])) return i;
    const bool overlong = (byte(0) == 0xE0 && byte(1) < 0xA0) || (byte(0) == 0xF0 && byte(1) < 0x90);
    const bool surrogate = byte(0) == 0xED && byte(1) >= 0xA0;
    const bool too_large = byte(0) == 0xF4 && byte(1) >= 0x90;
    if (overlong || surrogate || too_large) return i;
    i += n;
  }
  return text.npos;
}

void require_utf8(std::string_view text, const std::string& path, int64_t position) {
  if (const size_t at = first_invalid_utf8(text); at != text.npos)
    throw Error(path + ": is not UTF-8 text: byte " + std::to_string(position + int64_t(at)) +
                " begins no character. Convert it (iconv -f latin1 -t utf-8, say) or use --tokenizer bytes.");
}

}  // namespace strata
