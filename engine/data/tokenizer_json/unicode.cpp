// The one file that knows ICU; see unicode.h.
#include "engine/data/tokenizer_json/unicode.h"

#include <unicode/bytestream.h>
#include <unicode/edits.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/utf8.h>

#include "strata/error.h"

namespace strata {
namespace {

const icu::Normalizer2& normalizer_of(NormalizationForm form) {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* found = form == NormalizationForm::nfc ? icu::Normalizer2::getNFCInstance(status)
                                                                 : icu::Normalizer2::getNFKCInstance(status);
  if (U_FAILURE(status)) throw Error(std::string("ICU has no data for normalization: ") + u_errorName(status) + ".");
  return *found;
}

icu::StringPiece piece_of(std::string_view text) { return {text.data(), int32_t(text.size())}; }

// ICU counts bytes in 32 bits.
void require_short(std::string_view text) {
  if (text.size() > size_t(INT32_MAX) / 4)
    throw Error("a document of " + std::to_string(text.size()) + " bytes is too long to be normalized at once.");
}

}  // namespace

char32_t next_character(std::string_view text, size_t& at) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
  UChar32 character = 0;
  size_t i = at;
  U8_NEXT(bytes, i, text.size(), character);
  at = i;
  return char32_t(character);
}

char32_t last_character(std::string_view text) {
  size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return next_character(text, at);
}

bool is_space(char32_t character) { return u_isUWhiteSpace(UChar32(character)); }

bool is_part_of_a_word(char32_t character) {
  const auto c = UChar32(character);
  return u_isUAlphabetic(c) || u_hasBinaryProperty(c, UCHAR_JOIN_CONTROL) ||
         (U_MASK(u_charType(c)) & (U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK)) != 0;
}

size_t spaces_at_start(std::string_view text) {
  size_t end = 0;
  for (size_t at = 0; at < text.size() && is_space(next_character(text, at));) end = at;
  return end;
}

size_t spaces_at_end(std::string_view text) {
  size_t begin = text.size();
  while (begin > 0) {
    size_t at = begin - 1;
    while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
    size_t behind = at;
    if (!is_space(next_character(text, behind))) break;
    begin = at;
  }
  return text.size() - begin;
}

std::string with_replacement_characters(std::string_view bytes, int64_t& replaced) {
  std::string text;
  text.reserve(bytes.size());
  const auto* all = reinterpret_cast<const uint8_t*>(bytes.data());
  for (size_t at = 0; at < bytes.size();) {
    const size_t begin = at;
    UChar32 character = 0;
    U8_NEXT(all, at, bytes.size(), character);
    if (character < 0) ++replaced;
    text += character < 0 ? std::string_view("\xEF\xBF\xBD") : bytes.substr(begin, at - begin);
  }
  return text;
}

bool is_normalized(NormalizationForm form, std::string_view text) {
  require_short(text);
  UErrorCode status = U_ZERO_ERROR;
  const bool is = normalizer_of(form).isNormalizedUTF8(piece_of(text), status);
  STRATA_CHECK(U_SUCCESS(status));
  return is;
}

std::string normalized(NormalizationForm form, std::string_view text, Edits& edits) {
  require_short(text);
  UErrorCode status = U_ZERO_ERROR;
  std::string result;
  icu::StringByteSink<std::string> sink(&result);
  icu::Edits changes;
  normalizer_of(form).normalizeUTF8(0, piece_of(text), sink, &changes, status);
  for (auto change = changes.getFineChangesIterator(); change.next(status);)
    edits.replace(size_t(change.sourceIndex()), size_t(change.sourceIndex() + change.oldLength()),
                  size_t(change.destinationIndex()), size_t(change.destinationIndex() + change.newLength()));
  STRATA_CHECK(U_SUCCESS(status));
  return result;
}

}  // namespace strata
