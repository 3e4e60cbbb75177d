// Conversations to text, as the chat template in a model's folder has it (chat_template.jinja, or "chat_template" of
// tokenizer_config.json). Templates are Jinja, of which Python's jinja2 is the definition: one Python process renders
// all conversations, in jinja2's sandbox and with the names that `transformers` gives to templates.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

namespace strata {

// What of a conversation a model is to learn.
enum class TrainOn { assistant, all };

struct Rendered {
  struct Part {
    size_t begin, end;  // bytes
  };
  std::string text{};
  // What the assistant says, in order: what the template marks with {% generation %} blocks, as transformers has it; or
  // where it has none and TrainOn::assistant asks for it, what each of the assistant's messages adds to the text of the
  // conversation before it with a prompt to go on (add_generation_prompt).
  std::vector<Part> said{};
};

class ChatTemplate {
 public:
  // Starts python3. Throws Error when it or jinja2 is missing, and for a folder without a template or with a broken
  // one.
  explicit ChatTemplate(const std::string& folder, TrainOn train_on = TrainOn::all);
  ~ChatTemplate();
  ChatTemplate(const ChatTemplate&) = delete;
  ChatTemplate& operator=(const ChatTemplate&) = delete;
  // `conversation`: a line of JSON, an object with "messages" and perhaps "tools". Throws Error beginning with `place`
  // when the messages are none, the template refuses them, or what the assistant says is asked for and cannot be told.
  // One thread at a time.
  Rendered render(const std::string& conversation, const std::string& place);

 private:
  std::string answer();  // a line
  std::string folder_;
  pid_t process_ = -1;
  int socket_ = -1;       // to the process's standard input and from its output
  std::string received_;  // after the last answer
};

}  // namespace strata
