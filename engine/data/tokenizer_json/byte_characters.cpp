// The table of byte-level vocabularies; see byte_characters.h.
#include "engine/data/tokenizer_json/byte_characters.h"

#include <array>

#include "engine/data/tokenizer_json/unicode.h"

namespace strata {
namespace {

struct ByteTable {
  std::array<char32_t, 256> characters{};
  std::array<int, 512> bytes{};  // -1: none
  ByteTable() {
    bytes.fill(-1);
    char32_t next = 256;
    for (int byte = 0; byte < 256; ++byte) {
      const bool itself = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
      characters[size_t(byte)] = itself ? char32_t(byte) : next++;
      bytes[characters[size_t(byte)]] = byte;
    }
  }
};

const ByteTable& byte_table() {
  static const ByteTable table;
  return table;
}

}  // namespace

std::string character_of_byte(unsigned char byte) {
  const char32_t c = byte_table().characters[byte];
  if (c < 0x80) return {char(c)};
  return {char(0xC0 | c >> 6), char(0x80 | (c & 63))};
}

std::optional<std::string> bytes_of_characters(std::string_view text) {
  std::string bytes;
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_character(text, at);
    if (c >= 512 || byte_table().bytes[c] < 0) return {};
    bytes += char(byte_table().bytes[c]);
  }
  return bytes;
}

}  // namespace strata
