// Measures of a trained model without training: loss, perplexity and bits a byte on files, and multiple choice by
// likelihood. Prints nothing (tools/strata/evaluate_command.cpp does).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/data/tokenizer.h"
#include "engine/runtime/evaluator.h"

namespace strata {

// Sums over the tokens that were predicted.
struct FileScore {
  double nats = 0;
  int64_t tokens = 0;
  int64_t bytes = 0;  // of their text, without tokens that begin and end documents; 0: no tokenizer to tell
  FileScore& operator+=(const FileScore& other);
  double loss() const { return nats / double(tokens); }  // nats a token
  double perplexity() const;
  double bits_a_byte() const;  // NaN where bytes are not known
};

// A token file (*.bin) or a text file, a document that begins as the model wants. Cut into sequences of the window as
// training cuts it, the last one shorter: every token but the first is predicted once, from those before it in its
// sequence. Of a token file with a loss mask those tokens count that it says, and bytes are not known; with data.packed
// its documents are kept apart as in training. `tokenizer`: of text; may be null for token files. `tokenizer_checksum`:
// of what token files must have been made with, 0: not known. Throws Error naming the file.
FileScore score_file(Evaluator& evaluator, const std::string& path, const Tokenizer* tokenizer,
                     uint64_t tokenizer_checksum);

// A question: `choices[i]` stands right behind the context.
struct Question {
  std::string place;                         // "file:line"
  std::vector<std::vector<int32_t>> tokens;  // by choice: of context and choice
  std::vector<int64_t> first;                // by choice: the first token that is the choice's
  std::vector<int64_t> bytes;                // of each choice's text
  int64_t answer = 0;
};

// JSON lines {"context": TEXT, "choices": [TEXT, …], "answer": INDEX from 0}; other fields are not read. A choice's
// tokens are those of context and choice together that the context alone does not begin with. Throws Error with file
// and line, for a question that is longer than `window` too.
std::vector<Question> read_questions(const std::string& path, const Tokenizer& tokenizer, int64_t window,
                                     int64_t vocabulary);

// How many answers were the likeliest of their choices: by the choice's whole likelihood, and by that a byte of its
// text.
struct ChoiceScore {
  int64_t questions = 0, right = 0, right_by_bytes = 0;
};
ChoiceScore score_questions(Evaluator& evaluator, const std::vector<Question>& questions);

}  // namespace strata
