// The characters that stand for bytes in byte-level vocabularies: printable ones of Latin-1 for themselves, U+0100 and
// the following for the others (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).
#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace strata {

// UTF-8 of the character for a byte.
std::string character_of_byte(unsigned char byte);
// The bytes that characters stand for; none when one stands for no byte.
std::optional<std::string> bytes_of_characters(std::string_view text);

}  // namespace strata
