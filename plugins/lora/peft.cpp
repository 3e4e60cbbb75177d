// See lora.h.
#include <algorithm>
#include <map>
#include <set>

#include "plugins/lora/lora.h"
#include "strata/json.h"

namespace strata::lora {
namespace {

constexpr const char* kBefore = "base_model.model.";  // PEFT's wrappers around the model

// A matrix of the model under its foreign name, "model.layers.0.self_attn.q_proj", and its adapter.
struct Module {
  std::string name;
  const ExternalTensor* tensor = nullptr;
  const Adapter* adapter = nullptr;
  int64_t number = 0;  // of the matrix among those that the adapter has
};

std::string without_weight(const std::string& name) {
  constexpr std::string_view end = ".weight";
  return name.ends_with(end) ? name.substr(0, name.size() - end.size()) : name;
}
std::string last_part(const std::string& name) { return name.substr(name.rfind('.') + 1); }

std::vector<Module> modules_of(const std::vector<Adapter>& adapters, const std::vector<ExternalTensor>& model) {
  std::map<std::string, const Adapter*> by_weight;
  for (const Adapter& adapter : adapters) by_weight[adapter.weight] = &adapter;
  std::vector<Module> modules;
  std::set<std::pair<const Adapter*, int64_t>> written;
  for (const ExternalTensor& tensor : model) {
    if (tensor.rows.empty()) continue;
    const auto found = by_weight.find(tensor.rows.front().parameter);
    if (found == by_weight.end()) continue;
    const Adapter& adapter = *found->second;
    const int64_t matrix = adapter.rows.matrix_of(tensor.rows.front().to);
    for (const auto& rows : tensor.rows)
      if (rows.parameter != adapter.weight || adapter.rows.matrix_of(rows.to) != matrix ||
          adapter.rows.matrix_of(rows.to + rows.count - 1) != matrix)
        throw Error("PEFT's format has one adapter for \"" + tensor.name + "\", which is several matrices of " +
                    adapter.weight + " here; such adapters can be merged alone.");
    const auto chosen = std::find(adapter.rows.chosen.begin(), adapter.rows.chosen.end(), matrix);
    if (chosen == adapter.rows.chosen.end()) continue;
    if (!written.insert({&adapter, matrix}).second) continue;  // a second name of the same tensor
    modules.push_back({without_weight(tensor.name), &tensor, &adapter, chosen - adapter.rows.chosen.begin()});
  }
  return modules;
}

// What PEFT looks for at the end of names: their last parts, where all matrices so called have adapters.
Json::Array target_modules(const std::vector<Module>& modules, const std::vector<ExternalTensor>& model) {
  std::set<std::string> names, last, full;
  for (const Module& module : modules) names.insert(module.name), last.insert(last_part(module.name));
  for (const ExternalTensor& tensor : model) {
    const std::string name = without_weight(tensor.name);
    if (tensor.shape.size() == 2 && !names.contains(name) && last.contains(last_part(name)))
      full.insert(last_part(name));
  }
  Json::Array list;
  for (const std::string& one : last)
    if (!full.contains(one)) list.push_back(one);
  for (const std::string& one : names)
    if (full.contains(last_part(one))) list.push_back(one);
  return list;
}

}  // namespace

ExternalAddition peft_files(const std::vector<Adapter>& adapters, const std::vector<ExternalTensor>& model,
                            const Settings& settings) {
  ExternalAddition files{
      .config_name = "adapter_config.json", .config = {}, .tensors_name = "adapter_model.safetensors", .tensors = {}};
  const std::vector<Module> modules = modules_of(adapters, model);
  bool transposed = false;
  for (const Module& module : modules) {
    const Adapter& of = *module.adapter;
    transposed |= module.tensor->transposed;
    files.tensors.push_back({kBefore + module.name + ".lora_A.weight",
                             {of.rank, of.in},
                             false,
                             {{0, of.a, module.number * of.rank, of.rank}}});
    ExternalTensor b{kBefore + module.name + ".lora_B.weight", {0, of.rank}, false, {}};
    for (ExternalTensor::Rows rows : module.tensor->rows) {
      rows.parameter = of.b;
      rows.to = of.rows.place_of(rows.to).row;
      b.shape[0] += rows.count;
      b.rows.push_back(std::move(rows));
    }
    files.tensors.push_back(std::move(b));
  }
  files.config = Json(Json::Object{{"peft_type", "LORA"},
                                   {"task_type", "CAUSAL_LM"},
                                   {"base_model_name_or_path", Json()},
                                   {"r", settings.rank},
                                   {"lora_alpha", settings.alpha},
                                   {"lora_dropout", settings.dropout},
                                   {"target_modules", target_modules(modules, model)},
                                   {"fan_in_fan_out", transposed},
                                   {"bias", "none"},
                                   {"modules_to_save", Json()},
                                   {"use_rslora", false},
                                   {"use_dora", false},
                                   {"inference_mode", true}})
                     .dump(2) +
                 "\n";
  return files;
}

void check_peft_config(std::string_view text, const std::string& where, const Settings& settings) {
  const Json json = Json::parse(std::string(text), where);
  const auto there = [&](const char* key) -> const Json* {
    const Json* value = json.find(key);
    return value && !value->is_null() ? value : nullptr;
  };
  const auto refuse = [&](const std::string& what) { throw Error(where + ": " + what); };
  const Json* type = there("peft_type");
  if (!type || !type->is_string() || type->string("peft_type") != "LORA") refuse("\"peft_type\" is not \"LORA\".");
  // What else would make another result is refused, known or not; what only says how it came about is not.
  const std::set<std::string_view> harmless{"peft_type",
                                            "task_type",
                                            "r",
                                            "lora_alpha",
                                            "lora_dropout",
                                            "target_modules",
                                            "fan_in_fan_out",
                                            "bias",
                                            "revision",
                                            "inference_mode",
                                            "base_model_name_or_path",
                                            "auto_mapping",
                                            "peft_version",
                                            "loftq_config",
                                            "eva_config",
                                            "corda_config",
                                            "lora_ga_config",
                                            "layers_pattern",
                                            "megatron_core",
                                            "exclude_modules",
                                            "layers_to_transform",
                                            "init_lora_weights",
                                            "qalora_group_size",
                                            "runtime_config",
                                            "ensure_weight_tying"};
  for (const auto& [key, value] : json.object(where)) {
    const bool is_empty = value.is_null() || value.dump() == "false" || value.dump() == "[]" || value.dump() == "{}";
    if (!is_empty && !harmless.contains(key)) refuse("sets \"" + key + "\", which the plugin lora does not have.");
  }
  if (const Json* bias = there("bias"); bias && bias->string(where + ": \"bias\"") != "none")
    refuse("\"bias\" is \"" + bias->string("bias") + "\"; the plugin lora trains no biases (\"none\").");
  if (const Json* first = there("init_lora_weights"); first && first->is_string())
    if (const std::string& way = first->string("init_lora_weights");
        way != "gaussian" && way != "orthogonal" && way != "eva")
      refuse("\"init_lora_weights\" is \"" + way +
             "\": then the model beside the adapter is another one. Convert it with PEFT, or merge it.");
  const Json *rank = there("r"), *alpha = there("lora_alpha");
  if (!rank || rank->integer(where + ": \"r\"") != settings.rank)
    refuse("\"r\" is " + (rank ? std::to_string(rank->integer("r")) : std::string("not there")) +
           ", but plugins.lora.rank = " + std::to_string(settings.rank) + "; it is an adapter of another size.");
  if (!alpha || alpha->number(where + ": \"lora_alpha\"") != settings.alpha)
    refuse("\"lora_alpha\" is " + (alpha ? alpha->dump(0) : std::string("not there")) +
           ", which is not plugins.lora.alpha; set that to the same.");
}

}  // namespace strata::lora
