// The pre-tokenizer of a tokenizer.json, which divides text into the words that merges stay within: Split, ByteLevel,
// Metaspace, Digits and Sequence of them.
#pragma once
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/data/tokenizer_json/field.h"
#include "engine/data/tokenizer_json/pattern.h"
#include "engine/data/tokenizer_json/source.h"

namespace strata {

// A part of a text on its way to the model.
struct Stretch {
  std::string_view text{};
  bool first = false;  // begins the document
  bool open = false;   // more follows that is not here
  Source source{};
};

class PreTokenizer {
 public:
  PreTokenizer() = default;  // the whole text is a word
  explicit PreTokenizer(const Field& field);
  // Whether the model takes bytes (as the characters that stand for them, which is not done here).
  bool byte_level() const { return byte_level_; }

  using Take = std::function<void(std::string_view word, const Source& source, size_t at)>;
  // Calls `take` for each word in order, none empty; `at` is its place in the text of `source`. Of an open stretch the
  // last ones, which what follows could change, may lack or end too early, but begin where words begin.
  void divide(const Stretch& stretch, const Take& take) const { divide(0, stretch, take); }

 private:
  struct Step {
    enum class Kind { split, add_space, metaspace } kind;
    enum class Behavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };
    Behavior behavior = Behavior::isolated;
    Pattern pattern = Pattern::literal(" ");
    bool invert = false;
    std::string replacement{};
    enum class Prepend { always, first, never } prepend = Prepend::never;
  };
  void add(const Field& field);
  void add_split(const Field& field);
  void add_byte_level(const Field& field);
  void add_metaspace(const Field& field);
  void divide(size_t step, const Stretch& stretch, const Take& take) const;
  void split(size_t step, const Stretch& stretch, const Take& take) const;
  void change(size_t step, const Stretch& stretch, const Take& take) const;

  std::vector<Step> steps_;
  bool byte_level_ = false;
};

}  // namespace strata
