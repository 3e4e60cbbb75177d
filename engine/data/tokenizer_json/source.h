// Where in a document the bytes of a text come from that was made of it by changes one after the other: a document of
// any length can be encoded in parts where places in it, not in what normalization made of it, are known.
#pragma once
#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

namespace strata {

// What a change replaced, in rising order.
class Edits {
 public:
  void replace(size_t source_begin, size_t source_end, size_t result_begin, size_t result_end) {
    all_.push_back({source_begin, source_end, result_begin, result_end});
  }
  // The place in the source of a place in the result; none inside of what was replaced.
  std::optional<size_t> source(size_t result) const {
    const auto after =
        std::partition_point(all_.begin(), all_.end(), [&](const Edit& edit) { return edit.result_begin < result; });
    if (after == all_.begin()) return result;
    const Edit& edit = *std::prev(after);
    if (result < edit.result_end) return {};
    return edit.source_end + (result - edit.result_end);
  }

 private:
  struct Edit {
    size_t source_begin, source_end, result_begin, result_end;
  };
  std::vector<Edit> all_;
};

// A text is what `edits` made (nothing, if null) of the part of `before` (the document, if null) that begins at `at`.
struct Source {
  const Edits* edits = nullptr;
  const Source* before = nullptr;
  size_t at = 0;

  std::optional<size_t> document_byte(size_t byte) const {
    const std::optional<size_t> unedited = edits ? edits->source(byte) : byte;
    if (!unedited) return {};
    return before ? before->document_byte(*unedited + at) : *unedited + at;
  }
};

}  // namespace strata
