// `strata data prepare`: shows progress on standard error and says what was written. The work is in engine/data.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "strata/error.h"
#include "tools/strata/commands.h"

namespace strata {
namespace {

// On a terminal one line that is written over, elsewhere a line every ten seconds; nothing for work under a second.
class Progress {
 public:
  ~Progress() {
    if (live_ && shown_) std::fputs("\r\033[K", stderr);
  }
  void operator()(int64_t done, int64_t total) {
    const double now = seconds(), pause = live_ ? 0.5 : 10;
    if (now < 1 || now - last_ < pause) return;
    last_ = now;
    shown_ = true;
    const double left = now * double(total - done) / double(done);
    fmt::print(stderr, "{}preparing: {:.0f} of {:.0f} MB ({:.0f}%), {:.1f} MB/s, {:.0f} s left{}", live_ ? "\r" : "",
               double(done) / 1e6, double(total) / 1e6, 100.0 * double(done) / double(total), double(done) / now / 1e6,
               left, live_ ? "\033[K" : "\n");
    std::fflush(stderr);
  }

 private:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  bool live_ = isatty(STDERR_FILENO) == 1;
  bool shown_ = false;
  double last_ = 0;  // seconds
};

}  // namespace

int data_prepare_command(const PrepareArguments& arguments) {
  PrepareResult result;
  {
    Progress progress;
    PrepareArguments shown = arguments;
    shown.progress = [&](int64_t done, int64_t total) { progress(done, total); };
    result = prepare(shown);
  }
  for (const std::string& file : result.files) fmt::print("{}\n", file);
  fmt::print("{} training and {} validation tokens, vocabulary {}, {:.2f} bytes of text a token\n", result.train_tokens,
             result.validation_tokens, result.vocabulary,
             double(result.text_bytes) / double(result.train_tokens + result.validation_tokens));
  if (result.masked)
    fmt::print("{} of the tokens count: what the assistant says (loss masks are beside the token files).\n",
               result.counted);
  if (result.replaced > 0)
    fmt::print("{} places of the text are no UTF-8; each was read as U+FFFD.\n", result.replaced);
  if (result.validation_tokens == 0 && arguments.validation_fraction > 0)
    fmt::print("The text is too short for a validation part of {}; no validation file was written.\n",
               arguments.validation_fraction);
  return int(ExitCode::done);
}

}  // namespace strata
