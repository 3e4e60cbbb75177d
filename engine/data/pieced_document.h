// A document that is encoded piece by piece, for prepare.h.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/data/tokenizer.h"

namespace strata {

// A document of any length in pieces, each encoded with some text after it. Where two of them have a cut in common, the
// tokens before it are the first one's and those after it the second's: so the tokens are those of the whole. Two
// without become one piece.
class PiecedDocument {
 public:
  struct Piece {
    std::string text{};
    int64_t bytes = 0;  // of the file
    bool begins = false, ends = false;
    std::optional<EncodedPart> encoded{};
  };
  bool ended() const { return !pieces_.empty() && pieces_.back().ends; }
  void add(Piece piece) { pieces_.push_back(std::move(piece)); }

  // Those that can be encoded and are not yet.
  std::vector<size_t> to_encode() const;
  void encode(size_t i, const Tokenizer& tokenizer);
  // Tells tokens, and the bytes of the file that they are for, as far as they are known. True when that is all.
  bool write(const std::function<void(std::span<const int32_t> ids, int64_t bytes)>& tell);

 private:
  // Bytes of the next piece that are looked at: up to a whole character.
  static size_t text_after(std::string_view text);
  static const EncodedPart::Cut* cut_at(const Piece& piece, size_t byte);
  std::optional<EncodedPart::Cut> common_cut() const;
  void join();

  std::vector<Piece> pieces_;
  size_t taken_ = 0;  // bytes of the first piece whose tokens are told
};

}  // namespace strata
