// See pieced_document.h.
#include "engine/data/pieced_document.h"

#include <algorithm>

namespace strata {

std::vector<size_t> PiecedDocument::to_encode() const {
  std::vector<size_t> all;
  for (size_t i = 0; i < pieces_.size(); ++i)
    if (!pieces_[i].encoded && (pieces_[i].ends || i + 1 < pieces_.size())) all.push_back(i);
  return all;
}

void PiecedDocument::encode(size_t i, const Tokenizer& tokenizer) {
  Piece& piece = pieces_[i];
  std::string text = piece.text;
  if (!piece.ends) text += pieces_[i + 1].text.substr(0, text_after(pieces_[i + 1].text));
  piece.encoded =
      tokenizer.encode_part({.text = text, .own = piece.text.size(), .begins = piece.begins, .ends = piece.ends});
}

bool PiecedDocument::write(const std::function<void(std::span<const int32_t> ids, int64_t bytes)>& tell) {
  while (!pieces_.empty() && pieces_[0].encoded) {
    const Piece& first = pieces_[0];
    const std::span<const int32_t> ids(first.encoded->ids);
    const size_t from = taken_ == 0 ? 0 : cut_at(first, taken_)->token;
    if (first.ends) {
      tell(ids.subspan(from), first.bytes);
      return true;
    }
    if (!pieces_[1].encoded) return false;
    if (const auto cut = common_cut()) {
      tell(ids.subspan(from, cut->token - from), first.bytes);
      taken_ = cut->byte - first.text.size();
      pieces_.erase(pieces_.begin());
    } else {
      join();
    }
  }
  return false;
}

size_t PiecedDocument::text_after(std::string_view text) {
  size_t size = std::min(TextPart::kAfter, text.size());
  while (size < text.size() && size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;
  return size;
}

const EncodedPart::Cut* PiecedDocument::cut_at(const Piece& piece, size_t byte) {
  const auto& cuts = piece.encoded->cuts;
  const auto found = std::partition_point(cuts.begin(), cuts.end(), [&](const auto& cut) { return cut.byte < byte; });
  return found != cuts.end() && found->byte == byte ? &*found : nullptr;
}

std::optional<EncodedPart::Cut> PiecedDocument::common_cut() const {
  const size_t size = pieces_[0].text.size();
  for (const EncodedPart::Cut& cut : pieces_[0].encoded->cuts)
    if (cut.byte > size && cut.byte >= taken_ && cut_at(pieces_[1], cut.byte - size)) return cut;
  return {};
}

void PiecedDocument::join() {
  pieces_[0].text += pieces_[1].text;
  pieces_[0].bytes += pieces_[1].bytes;
  pieces_[0].ends = pieces_[1].ends;
  pieces_[0].encoded.reset();
  pieces_.erase(pieces_.begin() + 1);
}

}  // namespace strata
