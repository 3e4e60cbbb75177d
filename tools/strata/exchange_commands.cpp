// `import` and `export`: Hugging Face folders to Strata checkpoints and back, through the model plugin's mapping.
#include <fmt/format.h>

#include <filesystem>

#include "engine/checkpoint/external.h"
#include "engine/checkpoint/store.h"
#include "engine/plugin/loader.h"
#include "tools/strata/commands.h"

namespace strata {
namespace {

// Names and shapes of a model's parameters, from the smallest program that has them all.
std::map<std::string, Shape> parameters_of(Plugin& model, const std::string& name) {
  const NamedPlugin named{name, &model};
  const BuiltProgram built =
      build_program({&named, 1}, {.micro_batch = 1, .microbatches = 1, .sequence_length = 1}, Goal::logits);
  std::map<std::string, Shape> shapes;
  for (TensorId id : built.program.with_role(Role::parameter)) shapes[built.program[id].name] = built.program[id].shape;
  return shapes;
}

}  // namespace

int import_command_main(const ImportArguments& arguments) {
  const LoadedPlugin model = load_plugin(arguments.plugin, {});
  const auto table = model->import_config(read_external_config(arguments.source));
  if (!table)
    throw Error(arguments.source + "/config.json: is of an architecture that the plugin \"" + arguments.plugin +
                "\" does not know.");
  const auto shapes = parameters_of(*model, arguments.plugin);
  const auto values = import_tensors(arguments.source, model->external_tensors(), shapes);
  std::error_code problem;
  std::filesystem::create_directories(arguments.target, problem);
  if (problem) throw Error(arguments.target + ": cannot make the folder: " + problem.message() + ".");
  std::vector<TensorRecord> records;
  for (const auto& [name, data] : values)
    records.push_back({name, Role::parameter, DType::f32, shapes.at(name), data.data()});
  CheckpointStore store(arguments.target, 1);
  store.save({0, 0, {}, *table}, records);
  AtomicFile file(arguments.target + "/model.toml");
  file.write(*table);
  file.commit();
  fmt::print(
      "{}\n{}/model.toml: the [model] table to put into a configuration; start from the weights with run.initialize = "
      "\"{}\"\n",
      *store.latest(), arguments.target, arguments.target);
  return int(ExitCode::done);
}

int export_command_main(const ExportArguments& arguments) {
  const Session session(arguments.config, arguments.sets);
  const Checkpoint checkpoint(arguments.checkpoint.empty() ? find_checkpoint(session.run.directory, "run.directory")
                                                           : find_checkpoint(arguments.checkpoint, "--checkpoint"));
  const auto shapes = parameters_of(session.model(), "model");
  const auto config = session.model().export_config();
  if (!config) throw Error(arguments.config + ": its model plugin cannot export.");
  std::map<std::string, std::vector<float>> values;
  for (const auto& [name, shape] : shapes) {
    values[name].resize(size_t(elements(shape)));
    checkpoint.read(name, DType::f32, shape, values[name].data());
  }
  export_tensors(arguments.target, *config, session.model().external_tensors(), values);
  fmt::print("{}: step {}, for transformers' AutoModelForCausalLM.from_pretrained\n", arguments.target,
             checkpoint.info().step);
  return int(ExitCode::done);
}

}  // namespace strata
