// See line_documents.h.
#include "engine/data/line_documents.h"

#include <filesystem>

#include "strata/error.h"
#include "strata/json.h"

namespace strata {

int64_t line_cut(const std::string& path, int64_t size, double fraction) {
  TextReader reader(path, size - int64_t(double(size) * fraction), size);
  std::string piece;
  for (int64_t at = reader.position(); reader.next(piece); at = reader.position())
    if (const size_t end = piece.find('\n'); end != piece.npos) return at + int64_t(end) + 1;
  return size;
}

bool LineReader::next(std::string& line, int64_t& position) {
  line.clear();
  position = line_begin_;
  for (;;) {
    const size_t end = piece_.find('\n', at_);
    line.append(piece_, at_, end - at_);
    if (end != piece_.npos) {
      at_ = end + 1;
      line_begin_ += int64_t(line.size()) + 1;
      return true;
    }
    at_ = 0;
    if (reader_.next(piece_)) continue;
    piece_.clear();
    line_begin_ += int64_t(line.size());
    return !line.empty();
  }
}

LineDocument LineDocuments::of(const std::string& line, const std::string& place) {
  const Json json = Json::parse(line, place);
  if (json.find("messages")) {
    Rendered rendered = chat_template(place).render(line, place);
    return {std::move(rendered.text), true, std::move(rendered.said)};
  }
  const Json* text = json.find("text");
  if (!text) throw Error(place + ": has neither \"messages\" nor \"text\"; each line must be an object with one.");
  return {text->string(place + ": text"), false, {}};
}

ChatTemplate& LineDocuments::chat_template(const std::string& place) {
  if (!std::filesystem::is_directory(tokenizer_))
    throw Error(place + ": has messages, which need a chat template; name a model's folder with --tokenizer.");
  if (!template_) template_ = std::make_unique<ChatTemplate>(tokenizer_, train_on_);
  return *template_;
}

}  // namespace strata
