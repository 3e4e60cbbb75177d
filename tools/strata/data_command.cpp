// `strata data prepare`: says what was written.
#include <fmt/format.h>

#include "tools/strata/commands.h"

namespace strata {

int data_prepare_command(const PrepareArguments& arguments) {
  const PrepareResult result = prepare(arguments);
  for (const std::string& file : result.files) fmt::print("{}\n", file);
  fmt::print("{} training and {} validation tokens, vocabulary {}, {:.2f} bytes of text a token\n", result.train_tokens, result.validation_tokens, result.vocabulary,
             double(result.text_bytes) / double(result.train_tokens + result.validation_tokens));
  return int(ExitCode::done);
}

}  // namespace strata
