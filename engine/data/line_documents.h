// Documents that are lines of JSON, with a text or a conversation each, for prepare.h.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/data/chat_template.h"
#include "engine/data/text_reader.h"

namespace strata {

// Where the second part of a file of lines begins: after the first line end past all but the last `fraction` of it.
int64_t line_cut(const std::string& path, int64_t size, double fraction);

// The lines of part of a file, of any length, and where each begins.
class LineReader {
 public:
  LineReader(const std::string& path, int64_t begin, int64_t end) : reader_(path, begin, end), line_begin_(begin) {}
  bool next(std::string& line, int64_t& position);
  int64_t position() const { return line_begin_; }

 private:
  TextReader reader_;
  std::string piece_;
  size_t at_ = 0;  // in it
  int64_t line_begin_;
};

struct LineDocument {
  std::string text;
  bool conversation;  // its template has written what begins and ends it
  std::vector<Rendered::Part> said{};
};

// Makes documents of lines; the chat template is looked for when the first line with messages comes.
class LineDocuments {
 public:
  LineDocuments(std::string tokenizer, TrainOn train_on) : tokenizer_(std::move(tokenizer)), train_on_(train_on) {}
  LineDocument of(const std::string& line, const std::string& place);

 private:
  ChatTemplate& chat_template(const std::string& place);
  std::string tokenizer_;  // as named
  TrainOn train_on_;
  std::unique_ptr<ChatTemplate> template_;
};

}  // namespace strata
