// What ICU knows of characters, and UTF-8 as Python reads it. Texts are valid UTF-8 but where it says otherwise.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/data/tokenizer_json/source.h"

namespace strata {

// The character that begins at `at`, which moves behind it.
char32_t next_character(std::string_view text, size_t& at);
char32_t last_character(std::string_view text);  // of a text that is not empty

bool is_space(char32_t character);              // White_Space
bool is_part_of_a_word(char32_t character);     // \w of Unicode's UTS #18
size_t spaces_at_start(std::string_view text);  // bytes
size_t spaces_at_end(std::string_view text);    // bytes

// Valid UTF-8 of any bytes: each longest beginning of a character that does not go on, and each byte that begins none,
// becomes U+FFFD, as with Python's errors="replace". Counts them in `replaced`.
std::string with_replacement_characters(std::string_view bytes, int64_t& replaced);

enum class NormalizationForm { nfc, nfkc };
bool is_normalized(NormalizationForm form, std::string_view text);
std::string normalized(NormalizationForm form, std::string_view text, Edits& edits);

}  // namespace strata
