// The tokenizer of a Hugging Face folder, tokenizer.json: the same tokens as the library `tokenizers` gives.
// What it holds that is not supported is refused with file and field. Truncation, padding and dropout are.
#pragma once
#include <memory>
#include <string>
#include <string_view>

#include "engine/data/tokenizer.h"

namespace strata {

// `text` is what the file `path` holds. Throws Error.
std::unique_ptr<Tokenizer> parse_tokenizer_json(std::string_view text, const std::string& path);

}  // namespace strata
