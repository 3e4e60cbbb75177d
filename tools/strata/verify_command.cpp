// `verify`: whether plugins do to the numbers of a run what they say they do; of one configuration, or of all that are
// found on a small model.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "engine/runtime/stop.h"
#include "engine/verify/matrix.h"
#include "engine/verify/verify.h"
#include "memory/atomic_file.h"
#include "tools/strata/commands.h"

namespace strata {
namespace {

// The model of the matrix, and options with which plugins do something to it: tensors are small, and blocks are two.
constexpr const char* kMatrix = R"([model]
plugin = "gpt"
layers = 2
hidden = 32
heads = 2
ffn = 64
vocabulary = 61
context = 16
activation = "relu"
[data]
train = ["none"]
sequence_length = 16
global_batch = 8
micro_batch = 2
[device]
threads = 1
[plugins.adamw]
learning_rate = 1e-2
[plugins.clip]
max_norm = 0.5
[plugins.schedule]
warmup = 3
[plugins.gist]
minimum = 0
capacity = 1.0
[plugins.offload]
minimum = 0
directory = "@DIRECTORY@"
optimizer = "nvme"
parameters = "nvme"
activations = "nvme"
[plugins.powersgd]
rank = 4
minimum_ratio = 1.0
[plugins.quantized_exchange]
minimum = 0
[plugins.onebit]
minimum = 0
[plugins.top_k]
sparsity = 0.5
minimum = 0
[plugins.moe]
experts = 2
k = 1
[plugins.lora]
rank = 2
)";

void write(const std::string& file, const std::string& text) {
  if (file.empty()) return;
  AtomicFile out(file);
  out.write(text);
  out.commit();
}

// Removed with what is in it.
class Folder {
 public:
  Folder() : path_((std::filesystem::temp_directory_path() / "strata-verify-XXXXXX").string()) {
    if (!mkdtemp(path_.data())) throw Error(path_ + ": cannot make the folder.", ExitCode::failed);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// A backend on which nothing could run, such as one that there is not, is wrong usage.
void require_some_ran(const verifying::Matrix& matrix) {
  for (const std::string& backend : matrix.setup.backends) {
    const verifying::Cell* first = nullptr;
    const bool ran = std::any_of(matrix.cells.begin(), matrix.cells.end(), [&](const verifying::Cell& cell) {
      if (cell.backend == backend && !first) first = &cell;
      return cell.backend == backend && cell.verdict.kind != verifying::Verdict::Kind::refused;
    });
    if (first && !ran) throw Error("--devices " + backend + ": no plugin runs there. " + first->verdict.reason);
  }
}

int verify_matrix(const VerifyArguments& arguments) {
  if (arguments.layers > 0) throw Error("--layers is of a configuration; --matrix has a model of its own.");
  if (!arguments.json.empty() && arguments.json == arguments.html)
    throw Error("--json and --html name the same file; name two.");
  block_stop_signals();  // asked for after each cell, so that the folder is removed
  const Folder folder;
  verifying::MatrixSetup setup;
  setup.setup = {.config = arguments.config, .sets = arguments.sets, .steps = arguments.steps};
  if (arguments.config.empty()) {
    std::string text = kMatrix;
    const std::string mark = "@DIRECTORY@";
    text.replace(text.find(mark), mark.size(), folder.path());
    setup.setup.config = folder.path() + "/matrix.toml";
    write(setup.setup.config, text);
  }
  setup.backends = arguments.devices;
  setup.seed = arguments.seed;
  setup.larger = arguments.larger;
  setup.cells = arguments.cells;
  setup.only = arguments.only;
  const verifying::Matrix matrix = verifying::run_matrix(setup, [&](const verifying::Cell& cell) {
    if (stop_signal_waits()) throw Error("interrupted.", ExitCode::failed);
    if (arguments.only.empty() && cell.verdict.kind != verifying::Verdict::Kind::outside) return;
    fmt::print("{}\n", verifying::line_of(cell.verdict));
    std::fflush(stdout);
  });
  if (arguments.only.empty()) {
    require_some_ran(matrix);
    fmt::print("{}", verifying::matrix_text(matrix));
  }
  for (const verifying::Cell& cell : matrix.failures)
    if (!arguments.only.empty()) fmt::print("{}\n", verifying::failure_of(cell.verdict));
  write(arguments.json, verifying::matrix_json(matrix));
  write(arguments.html, verifying::matrix_page(matrix));
  return int(matrix.failures.empty() ? ExitCode::done : ExitCode::failed);
}

}  // namespace

int verify_command_main(const VerifyArguments& arguments) {
  if (arguments.matrix) return verify_matrix(arguments);
  if (arguments.config.empty()) throw Error("verify needs a configuration, or --matrix.");
  verifying::Setup setup{.config = arguments.config, .sets = arguments.sets, .steps = arguments.steps};
  if (arguments.layers > 0) setup.sets.push_back(fmt::format("model.layers={}", arguments.layers));
  fmt::print("{:<48} {:<22} {:>10} {:>10}  {}\n", "plugins", "mesh", "planned", "measured", "beside the plain program");
  const verifying::Report report = verifying::verify(setup, [](const verifying::Verdict& verdict) {
    fmt::print("{}\n", verifying::line_of(verdict));
    std::fflush(stdout);
  });
  fmt::print("the plain program: {}\n", report.program);
  for (const verifying::Verdict& failure : report.failures) fmt::print("{}\n", verifying::failure_of(failure));
  write(arguments.json, verifying::json_of(report));
  return int(report.passed() ? ExitCode::done : ExitCode::failed);
}

}  // namespace strata
