// The added tokens of a tokenizer.json, special ones among them: found in text before anything else happens to it.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace strata {

struct AddedToken {
  std::string content{};
  int32_t id = 0;
  bool single_word = false, strip_left = false, strip_right = false, normalized = false, special = false;
};

class AddedTokens {
 public:
  void add(const AddedToken& token, const std::string& as_searched);
  bool empty() const { return tokens_.empty(); }

  // Calls token(id, begin) and text(begin, end) in order, for tokens in the text (at each place the longest) and for
  // what is between them.
  template <class Token, class Text>
  void divide(std::string_view text, Token&& on_token, Text&& on_text) const {
    size_t from = 0, search = 0;
    for (Match match; next(text, search, from, match);) {
      if (from < match.begin) on_text(from, match.begin);
      on_token(match.id, match.begin);
      from = match.end;
    }
    if (from < text.size()) on_text(from, text.size());
  }

 private:
  struct Searched {
    AddedToken token;
    std::string content;
  };
  struct Match {
    size_t begin, end;  // with the spaces that belong to it
    int32_t id;
  };
  bool next(std::string_view text, size_t& search, size_t taken, Match& match) const;
  const Searched* longest_at(std::string_view text, size_t at) const;

  std::vector<Searched> tokens_;
  std::array<std::vector<uint32_t>, 256> by_first_byte_;  // longest first
};

}  // namespace strata
