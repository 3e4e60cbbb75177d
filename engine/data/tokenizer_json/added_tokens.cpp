// Search for added tokens; see added_tokens.h.
#include "engine/data/tokenizer_json/added_tokens.h"

#include <algorithm>

#include "engine/data/tokenizer_json/unicode.h"

namespace strata {

void AddedTokens::add(const AddedToken& token, const std::string& as_searched) {
  if (as_searched.empty()) return;
  auto& bucket = by_first_byte_[static_cast<unsigned char>(as_searched[0])];
  bucket.push_back(uint32_t(tokens_.size()));
  tokens_.push_back({token, as_searched});
  std::stable_sort(bucket.begin(), bucket.end(),
                   [&](uint32_t a, uint32_t b) { return tokens_[a].content.size() > tokens_[b].content.size(); });
}

const AddedTokens::Searched* AddedTokens::longest_at(std::string_view text, size_t at) const {
  for (const uint32_t index : by_first_byte_[static_cast<unsigned char>(text[at])])
    if (text.substr(at).starts_with(tokens_[index].content)) return &tokens_[index];
  return nullptr;
}

bool AddedTokens::next(std::string_view text, size_t& search, size_t taken, Match& match) const {
  if (tokens_.empty()) return false;
  for (size_t at = search; at < text.size(); ++at) {
    const Searched* found = longest_at(text, at);
    if (!found) continue;
    const size_t end = search = at + found->content.size();
    const std::string_view before = text.substr(0, at), after = text.substr(end);
    size_t first = 0;
    if (found->token.single_word && ((at > 0 && is_part_of_a_word(last_character(before))) ||
                                     (!after.empty() && is_part_of_a_word(next_character(after, first))))) {
      at = end - 1;
      continue;
    }
    match = {at, end, found->token.id};
    if (found->token.strip_left) match.begin = std::max(at - spaces_at_end(before), taken);
    if (found->token.strip_right) match.end += spaces_at_start(after);
    return true;
  }
  search = text.size();
  return false;
}

}  // namespace strata
