// The `strata` command: what it takes, in words a person can learn from. The work is done by the functions called here.
#include <CLI/CLI.hpp>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "engine/runtime/stop.h"
#include "strata/error.h"
#include "tools/strata/commands.h"

namespace {

using namespace strata;

// CONFIG and --set, which most commands share.
void add_config(CLI::App& command, ConfigArguments& arguments) {
  command.add_option("config", arguments.config, "TOML file that describes the run")->required();
  command.add_option("--set", arguments.sets, "override a key, for example --set run.steps=10 (repeatable)")
      ->type_name("KEY=VALUE")
      ->take_all()
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

// Runs before the libraries' initializers, and so before those of sanitizers: system calls only, not instrumented.
__attribute__((no_sanitize("address", "thread", "undefined"))) void block_first(int, char**, char**) {
  const uint64_t signals = 1u << (SIGINT - 1) | 1u << (SIGQUIT - 1) | 1u << (SIGTERM - 1) | 1u << (SIGHUP - 1) |
                           1u << (SIGUSR1 - 1) | 1u << (SIGUSR2 - 1) | 1u << (SIGXCPU - 1);
  syscall(SYS_rt_sigprocmask, SIG_BLOCK, &signals, nullptr, sizeof signals);
}
__attribute__((section(".preinit_array"), used)) void (*const block_before_libraries)(int, char**,
                                                                                      char**) = block_first;

}  // namespace

int main(int argc, char** argv) {
  // Libraries under libfabric (PSM) print backtraces of their own from handlers that they install when loaded. Signals
  // that ask to stop have been blocked since before that.
  for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGINT, SIGTERM}) std::signal(signal, SIG_DFL);
  block_stop_signals();
  CLI::App app{
      "Strata trains large neural networks on limited memory.\nA TOML file names the model, the data and the "
      "strategies; "
      "`strata plan` says what a run will need before it starts."};
  app.name("strata");
  app.require_subcommand(1);
  app.set_version_flag("--version", STRATA_VERSION);
  std::function<int()> action;

  TrainArguments train_arguments;
  auto* train_command =
      app.add_subcommand("train",
                         "Train the model of a configuration.\nWrites checkpoints and log.jsonl to "
                         "run.directory.\nCtrl-C, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2 or SIGXCPU: finishes the "
                         "step, saves, exits with 0; a second Ctrl-C ends at once, with 130.");
  add_config(*train_command, train_arguments);
  train_command->add_flag("--resume", train_arguments.resume, "go on from the newest checkpoint in run.directory");
  train_command->add_option("--trace", train_arguments.trace,
                            "write a trace of the last step for ui.perfetto.dev or chrome://tracing");
  train_command
      ->add_option("--restarts", train_arguments.restarts,
                   "with several ranks started here: start again from the last checkpoint so often when a rank fails")
      ->check(CLI::NonNegativeNumber);
  train_command->callback([&] { action = [&] { return train_command_main(train_arguments); }; });

  PlanArguments plan_arguments;
  auto* plan_command = app.add_subcommand(
      "plan", "Say what a step needs before anything is allocated: bytes by category, where the peak is, FLOPs.");
  add_config(*plan_command, plan_arguments);
  plan_command->add_flag("--program", plan_arguments.program, "print the whole step program");
  plan_command->add_flag("--json", plan_arguments.json, "print JSON for machines");
  plan_command->add_option("--trace", plan_arguments.trace,
                           "write the predicted step as a trace for ui.perfetto.dev or chrome://tracing");
  plan_command->add_option("--html", plan_arguments.html,
                           "write a page with timelines of memory and streams, as planned");
  plan_command->callback([&] { action = [&] { return plan_command_main(plan_arguments); }; });

  auto* bench_command = app.add_subcommand("bench", "Measure on this machine.");
  bench_command->require_subcommand(1);
  BenchMemoryArguments bench_arguments;
  auto* bench_memory_command =
      bench_command->add_subcommand("memory",
                                    "What memory strategies save on the model of a configuration, and what they cost: "
                                    "planned and\nmeasured peaks, time "
                                    "against the plain run and its spread, stalls, difference of the loss, and what "
                                    "follows.");
  add_config(*bench_memory_command, bench_arguments);
  bench_memory_command
      ->add_option("--run", bench_arguments.runs,
                   "a run beside the plain one, as \"NAME: KEY=VALUE KEY=VALUE\" (repeatable; default: a set of all)")
      ->type_name("TEXT")
      ->take_all()
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  bench_memory_command->add_option("--steps", bench_arguments.steps, "steps of each run")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  bench_memory_command->add_option(
      "--directory", bench_arguments.directory,
      "folder for what rests on NVMe (default: ./strata-bench-offload, removed afterwards)");
  bench_memory_command->add_option("--json", bench_arguments.json, "write the figures as JSON");
  bench_memory_command->add_option("--html", bench_arguments.html, "write a page with timelines of memory and streams");
  bench_memory_command->add_option("--picture", bench_arguments.picture,
                                   "write memory over the step of each run as one SVG picture");
  bench_memory_command->callback([&] { action = [&] { return bench_memory_command_main(bench_arguments); }; });
  BenchKernelsArguments kernels_arguments;
  auto* bench_kernels_command =
      bench_command->add_subcommand("kernels",
                                    "What each kind of op takes in a step of a configuration: time, bytes and FLOPs a "
                                    "second,\nbeside what memory and products reach here.");
  add_config(*bench_kernels_command, kernels_arguments);
  bench_kernels_command->add_option("--steps", kernels_arguments.steps, "steps to run; the last one is shown")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  bench_kernels_command->add_option("--json", kernels_arguments.json, "write the figures as JSON");
  bench_kernels_command->callback([&] { action = [&] { return bench_kernels_command_main(kernels_arguments); }; });

  CheckArguments check_arguments;
  auto* check_command =
      app.add_subcommand("check", "Check a configuration, its data, its plan and the run's folder without training.");
  add_config(*check_command, check_arguments);
  check_command->add_flag("--resume", check_arguments.resume, "as train --resume: look at the newest checkpoint, too");
  check_command->callback([&] { action = [&] { return check_command_main(check_arguments); }; });

  PluginsArguments plugins_arguments;
  auto* plugins_command = app.add_subcommand("plugins", "List the plugins found, or show one with its options.");
  plugins_command->add_option("name", plugins_arguments.name, "plugin to show");
  plugins_command->add_option("--path", plugins_arguments.paths, "more folders to search");
  plugins_command->add_flag("--schema", plugins_arguments.schema,
                            "print the JSON schema of a whole configuration, for editors");
  plugins_command->add_flag("--markdown", plugins_arguments.markdown,
                            "print the reference of all options, as in docs/options.md");
  plugins_command->callback([&] { action = [&] { return plugins_command_main(plugins_arguments); }; });

  NewPluginArguments new_plugin_arguments;
  auto* new_plugin_command = app.add_subcommand(
      "new-plugin", "Write a folder with a plugin to start from: source, CMakeLists.txt, README, test.");
  new_plugin_command
      ->add_option("name", new_plugin_arguments.name, "name of the plugin: lower-case letters, digits and _")
      ->required();
  new_plugin_command->add_option("--directory", new_plugin_arguments.directory, "folder to write (default: ./NAME)");
  new_plugin_command->callback([&] { action = [&] { return new_plugin_command_main(new_plugin_arguments); }; });

  auto* data_command = app.add_subcommand("data", "Work with training data.");
  data_command->require_subcommand(1);
  PrepareArguments prepare_arguments;
  auto* prepare_command =
      data_command->add_subcommand("prepare", "Turn text files into token files (train_*.bin, validation_*.bin).");
  prepare_command->add_option("inputs", prepare_arguments.inputs, "UTF-8 text files; - for standard input")->required();
  prepare_command->add_option("--output", prepare_arguments.output_directory, "folder to write")->required();
  prepare_command
      ->add_option("--tokenizer", prepare_arguments.tokenizer,
                   "\"bytes\", a SentencePiece .model file, or \"train:SIZE\" to train one")
      ->capture_default_str();
  prepare_command
      ->add_option("--validation", prepare_arguments.validation_fraction, "share of the text kept for validation")
      ->capture_default_str();
  prepare_command->add_option("--shard-tokens", prepare_arguments.shard_tokens, "tokens a file at most")
      ->capture_default_str();
  prepare_command->callback([&] { action = [&] { return data_prepare_command(prepare_arguments); }; });

  GenerateArguments generate_arguments;
  auto* generate_command = app.add_subcommand("generate", "Sample text from a trained model.");
  add_config(*generate_command, generate_arguments);
  generate_command->add_option("--checkpoint", generate_arguments.checkpoint,
                               "checkpoint folder (default: the newest in run.directory)");
  generate_command->add_option("--tokenizer", generate_arguments.tokenizer,
                               "folder with tokenizer.txt or tokenizer.model (default: beside the training data)");
  generate_command->add_option("--prompt", generate_arguments.prompt, "text to go on from");
  generate_command->add_option("--tokens", generate_arguments.sampling.tokens, "tokens to sample")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  generate_command
      ->add_option("--temperature", generate_arguments.sampling.temperature, "0 takes the most probable token")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  generate_command->add_option("--top-k", generate_arguments.sampling.top_k, "sample among the k most probable; 0: all")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  generate_command->add_option("--seed", generate_arguments.sampling.seed, "seed of the sampling")
      ->capture_default_str();
  generate_command->callback([&] { action = [&] { return generate_command_main(generate_arguments); }; });

  ImportArguments import_arguments;
  auto* import_command = app.add_subcommand(
      "import", "Turn a Hugging Face folder (GPT-2, Llama, Qwen2) into a Strata checkpoint and a [model] table.");
  import_command->add_option("source", import_arguments.source, "folder with config.json and safetensors")->required();
  import_command->add_option("target", import_arguments.target, "folder to write")->required();
  import_command->add_option("--plugin", import_arguments.plugin, "model plugin")->capture_default_str();
  import_command->add_flag("--overwrite", import_arguments.overwrite, "replace what an import before wrote there");
  import_command->callback([&] { action = [&] { return import_command_main(import_arguments); }; });

  ExportArguments export_arguments;
  auto* export_command =
      app.add_subcommand("export", "Write a trained model as a Hugging Face folder that transformers loads.");
  add_config(*export_command, export_arguments);
  export_command->add_option("target", export_arguments.target, "folder to write")->required();
  export_command->add_option("--checkpoint", export_arguments.checkpoint,
                             "checkpoint folder (default: the newest in run.directory)");
  export_command->add_option("--dtype", export_arguments.dtype, "numbers of the files, rounded to nearest")
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  export_command
      ->add_option("--shard-size", export_arguments.shard_size,
                   "bytes of tensors in one file at most, for example 500MB or 2GiB; a larger model becomes several "
                   "files with an index")
      ->capture_default_str()
      ->transform(CLI::AsSizeValue(true))
      ->check(CLI::PositiveNumber);
  export_command->add_flag("--overwrite", export_arguments.overwrite,
                           "replace the model that is in the folder; other files in it stay");
  export_command->callback([&] { action = [&] { return export_command_main(export_arguments); }; });

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? int(ExitCode::done) : int(ExitCode::usage);
  }
  if (!train_command->parsed()) unblock_stop_signals();  // the others have nothing to finish
  try {
    return action();
  } catch (const Error& error) {
    std::fprintf(stderr, "strata: %s\n", error.what());
    return int(error.code());
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "strata: %s\n", kOutOfMemory.data());
    return int(ExitCode::failed);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "strata: %s\n", error.what());
    return int(ExitCode::failed);
  }
}
