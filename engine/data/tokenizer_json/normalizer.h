// The normalizer of a tokenizer.json: NFC, NFKC, Prepend, Replace and Sequence of them.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "engine/data/tokenizer_json/field.h"
#include "engine/data/tokenizer_json/pattern.h"
#include "engine/data/tokenizer_json/source.h"
#include "engine/data/tokenizer_json/unicode.h"

namespace strata {

// `text` with every match of `pattern` replaced.
std::string replaced(std::string_view text, const Pattern& pattern, std::string_view content, Edits& edits);

class Normalizer {
 public:
  Normalizer() = default;  // changes nothing
  explicit Normalizer(const Field& field);

  // What a text became, valid while the text it was made of is.
  struct Result {
    std::string_view text;
    std::vector<std::string> made;  // one a step that changed something
    std::vector<Edits> edits;
    std::vector<Source> sources;  // of each, in the one before
    Source source() const { return sources.empty() ? Source() : sources.back(); }
  };
  // `at`: where in the document the text begins.
  void apply(std::string_view text, size_t at, Result& result) const;
  std::string apply(std::string_view text) const;

 private:
  struct Step {
    enum class Kind { form, prepend, replace } kind;
    NormalizationForm form = NormalizationForm::nfc;
    std::string content{};
    Pattern pattern = Pattern::literal(" ");
  };
  void add(const Field& field);
  std::vector<Step> steps_;
};

}  // namespace strata
