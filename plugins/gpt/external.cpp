// Mapping to GPT2LMHeadModel, LlamaForCausalLM and Qwen2ForCausalLM; see external.h.
#include "plugins/gpt/external.h"

#include <cstdio>

#include "strata/json.h"

namespace {

using strata::Error;
using strata::ExternalTensor;
using strata::Json;

enum class Family { gpt2, llama, qwen2 };

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.12g", value);
  std::string result = text;
  if (result.find_first_of(".en") == std::string::npos) result += ".0";
  return result;
}

// Reads keys of a config.json; absent ones and nulls take the default.
class Settings {
 public:
  explicit Settings(const Json& json) : json_(json) {}
  int64_t integer(const char* key, int64_t otherwise) const {
    return present(key) ? json_.find(key)->integer(name(key)) : otherwise;
  }
  double number(const char* key, double otherwise) const {
    return present(key) ? json_.find(key)->number(name(key)) : otherwise;
  }
  bool boolean(const char* key, bool otherwise) const {
    return present(key) ? json_.find(key)->boolean(name(key)) : otherwise;
  }
  std::string string(const char* key, const char* otherwise) const {
    return present(key) ? json_.find(key)->string(name(key)) : otherwise;
  }
  bool present(const char* key) const { return json_.find(key) && !json_.find(key)->is_null(); }
  // A number of things: from 1 on. `otherwise` 0: it must be there.
  int64_t size(const char* key, int64_t otherwise = 0, int64_t most = int64_t{1} << 31) const {
    if (otherwise == 0 && !present(key)) throw Error("config.json lacks \"" + std::string(key) + "\".");
    const int64_t value = integer(key, otherwise);
    if (value < 1 || value > most)
      throw Error(name(key) + " is " + std::to_string(value) + "; expected 1 to " + std::to_string(most) + ".");
    return value;
  }
  double positive(const char* key, double otherwise) const {
    const double value = number(key, otherwise);
    if (!(value > 0)) throw Error(name(key) + " is " + number_text(value) + "; expected more than 0.");
    return value;
  }
  void must_be(const char* key, bool wanted) const {
    if (boolean(key, wanted) != wanted)
      throw Error("config.json sets \"" + std::string(key) + "\" to " + (wanted ? "false" : "true") +
                  ", which the gpt plugin does not have.");
  }
  const Json* find(const char* key) const { return json_.find(key); }

 private:
  static std::string name(const char* key) { return "config.json: \"" + std::string(key) + "\""; }
  const Json& json_;
};

// Names of GPT-2's activations; the first of equals is written.
constexpr struct {
  std::string_view ours, theirs;
} kGpt2Activations[] = {
    {"gelu", "gelu_new"}, {"gelu", "gelu_pytorch_tanh"}, {"relu", "relu"}, {"squared_relu", "relu2"}};

GptConfig from_gpt2(const Settings& s) {
  GptConfig c;
  c.layers = s.size("n_layer", 0, kMostLayers);
  c.hidden = s.size("n_embd");
  c.heads = s.size("n_head");
  c.ffn = s.present("n_inner") ? s.size("n_inner") : 4 * c.hidden;
  c.vocabulary = s.size("vocab_size");
  c.context = s.size("n_positions", 1024);
  c.norm_epsilon = s.positive("layer_norm_epsilon", 1e-5);
  c.dropout = s.number("resid_pdrop", 0.1);  // and embd_pdrop; attention has none here
  if (!(c.dropout >= 0 && c.dropout <= 0.99))
    throw Error("config.json: \"resid_pdrop\" is " + number_text(c.dropout) + "; expected 0 to 0.99.");
  c.tied = s.boolean("tie_word_embeddings", true);
  const std::string activation = s.string("activation_function", "gelu_new");
  const auto known = std::find_if(std::begin(kGpt2Activations), std::end(kGpt2Activations),
                                  [&](const auto& names) { return names.theirs == activation; });
  if (known == std::end(kGpt2Activations))
    throw Error("config.json sets \"activation_function\" to \"" + activation +
                "\"; the gpt plugin has gelu_new (gelu_pytorch_tanh, the tanh form), relu and relu2.");
  c.activation = known->ours;
  s.must_be("scale_attn_weights", true);
  s.must_be("scale_attn_by_inverse_layer_idx", false);
  s.must_be("add_cross_attention", false);
  return c;
}

// Newer files nest the rotary settings in "rope_parameters", older ones have "rope_theta" and "rope_scaling".
double rotary_base(const Settings& s) {
  for (const char* key : {"rope_scaling", "rope_parameters"})
    if (s.present(key)) {
      const Settings nested(*s.find(key));
      for (const char* type : {"rope_type", "type"})
        if (nested.string(type, "default") != "default")
          throw Error("config.json sets \"" + std::string(key) + "\" of type \"" + nested.string(type, "") +
                      "\"; the gpt plugin has the default rotary positions only.");
      if (nested.present("rope_theta")) return nested.positive("rope_theta", 10000);
    }
  return s.positive("rope_theta", 10000);
}

GptConfig from_llama(const Settings& s, bool qwen) {
  GptConfig c;
  c.layers = s.size("num_hidden_layers", 0, kMostLayers);
  c.hidden = s.size("hidden_size");
  c.heads = s.size("num_attention_heads");
  c.kv_heads = s.size("num_key_value_heads", qwen ? 32 : c.heads);  // as in their configuration classes
  c.head_size = s.present("head_dim") ? s.size("head_dim") : 0;
  c.ffn = s.size("intermediate_size");
  c.vocabulary = s.size("vocab_size");
  c.context = s.size("max_position_embeddings", qwen ? 32768 : 2048);
  c.positions = "rotary";
  c.rotary_base = rotary_base(s);
  c.norm = "rms_norm";
  c.norm_epsilon = s.positive("rms_norm_eps", 1e-6);
  c.activation = "swiglu";
  c.bias = false;
  c.qkv_bias = qwen;
  c.tied = s.boolean("tie_word_embeddings", false);
  if (const std::string activation = s.string("hidden_act", "silu"); activation != "silu")
    throw Error("config.json sets \"hidden_act\" to \"" + activation + "\"; the gpt plugin has silu in this family.");
  if (qwen) s.must_be("use_sliding_window", false);
  s.must_be("attention_bias", false);
  s.must_be("mlp_bias", false);
  return c;
}

Family family_of(const GptConfig& c) {
  if (c.positions == "learned" && c.norm == "layer_norm" && c.activation != "swiglu" && c.bias &&
      c.kv_heads == c.heads && c.head_size * c.heads == c.hidden)
    return Family::gpt2;
  if (c.positions == "rotary" && c.norm == "rms_norm" && c.activation == "swiglu" && !c.bias)
    return c.qkv_bias ? Family::qwen2 : Family::llama;
  throw Error(
      "no Hugging Face architecture has this combination of model options; GPT-2 has learned positions, layer_norm, "
      "gelu, relu or squared_relu and biases, "
      "Llama and Qwen2 have rotary positions, rms_norm, swiglu and no biases (but qkv_bias in Qwen2).");
}

class Mapping {
 public:
  explicit Mapping(const GptConfig& config) : c_(config) {}
  std::vector<ExternalTensor> tensors;

  // One foreign tensor that is one parameter; `columns` 0 for a vector.
  void whole(const std::string& name, const std::string& parameter, int64_t rows, int64_t columns,
             bool transposed = false) {
    tensors.push_back({name, shape(rows, columns, transposed), transposed, {{0, parameter, 0, rows}}});
  }
  void ignored(const std::string& name) { tensors.push_back({name, {}, false, {}}); }

  // Which of q (0), k (1), v (2) of every head go where in our grouped rows; `base` is the first foreign row.
  void grouped(ExternalTensor& tensor, const std::string& parameter, int part, int64_t base) const {
    const int64_t size = c_.head_size, per_group = c_.heads / c_.kv_heads;
    const int64_t heads = part == 0 ? c_.heads : c_.kv_heads;
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t group = part == 0 ? h / per_group : h;
      const int64_t slot = part == 0 ? h % per_group : per_group + part - 1;
      tensor.rows.push_back({base + h * size, parameter, (group * (per_group + 2) + slot) * size, size});
    }
  }
  static strata::Shape shape(int64_t rows, int64_t columns, bool transposed) {
    if (columns == 0) return {rows};
    return transposed ? strata::Shape{columns, rows} : strata::Shape{rows, columns};
  }

 private:
  const GptConfig& c_;
};

void map_gpt2(const GptConfig& c, Mapping& m) {
  m.whole("transformer.wte.weight", "embedding.weight", c.vocabulary, c.hidden);
  m.whole("transformer.wpe.weight", "positions.weight", c.context, c.hidden);
  for (int64_t i = 0; i < c.layers; ++i) {
    const std::string there = "transformer.h." + std::to_string(i) + ".", here = "block." + std::to_string(i) + ".";
    for (const char* part : {"weight", "bias"}) {
      const bool weight = part == std::string("weight");
      const int64_t hidden = weight ? c.hidden : 0, ffn = weight ? c.ffn : 0;
      m.whole(there + "ln_1." + part, here + "norm1." + part, c.hidden, 0);
      m.whole(there + "ln_2." + part, here + "norm2." + part, c.hidden, 0);
      ExternalTensor qkv{there + "attn.c_attn." + part, Mapping::shape(3 * c.hidden, hidden, weight), weight, {}};
      for (int p = 0; p < 3; ++p) m.grouped(qkv, here + "qkv." + part, p, p * c.hidden);
      m.tensors.push_back(qkv);
      m.whole(there + "attn.c_proj." + part, here + "attention_output." + part, c.hidden, hidden, weight);
      m.whole(there + "mlp.c_fc." + part, here + "mlp.up." + part, c.ffn, hidden, weight);
      m.whole(there + "mlp.c_proj." + part, here + "mlp.down." + part, c.hidden, ffn, weight);
    }
    m.ignored(there + "attn.bias");
    m.ignored(there + "attn.masked_bias");
  }
  m.whole("transformer.ln_f.weight", "norm.weight", c.hidden, 0);
  m.whole("transformer.ln_f.bias", "norm.bias", c.hidden, 0);
}

void map_llama(const GptConfig& c, Mapping& m) {
  m.whole("model.embed_tokens.weight", "embedding.weight", c.vocabulary, c.hidden);
  for (int64_t i = 0; i < c.layers; ++i) {
    const std::string there = "model.layers." + std::to_string(i) + ".", here = "block." + std::to_string(i) + ".";
    m.whole(there + "input_layernorm.weight", here + "norm1.weight", c.hidden, 0);
    m.whole(there + "post_attention_layernorm.weight", here + "norm2.weight", c.hidden, 0);
    const char* names[] = {"q_proj", "k_proj", "v_proj"};
    for (int p = 0; p < 3; ++p) {
      const int64_t rows = (p == 0 ? c.heads : c.kv_heads) * c.head_size;
      ExternalTensor weight{there + "self_attn." + names[p] + ".weight", {rows, c.hidden}, false, {}};
      m.grouped(weight, here + "qkv.weight", p, 0);
      m.tensors.push_back(weight);
      if (!c.qkv_bias) continue;
      ExternalTensor bias{there + "self_attn." + names[p] + ".bias", {rows}, false, {}};
      m.grouped(bias, here + "qkv.bias", p, 0);
      m.tensors.push_back(bias);
    }
    m.whole(there + "self_attn.o_proj.weight", here + "attention_output.weight", c.hidden, c.heads * c.head_size);
    m.whole(there + "mlp.gate_proj.weight", here + "mlp.gate.weight", c.ffn, c.hidden);
    m.whole(there + "mlp.up_proj.weight", here + "mlp.up.weight", c.ffn, c.hidden);
    m.whole(there + "mlp.down_proj.weight", here + "mlp.down.weight", c.hidden, c.ffn);
    m.ignored(there + "self_attn.rotary_emb.inv_freq");
  }
  m.ignored("model.rotary_emb.inv_freq");
  m.whole("model.norm.weight", "norm.weight", c.hidden, 0);
}

}  // namespace

std::optional<GptConfig> gpt_from_external(const std::string& config_json) {
  const Json json = Json::parse(config_json, "config.json");
  const Settings settings(json);
  const std::string type = settings.string("model_type", "");
  if (type == "gpt2") return from_gpt2(settings);
  if (type == "llama") return from_llama(settings, false);
  if (type == "qwen2") return from_llama(settings, true);
  return {};
}

std::string gpt_to_toml(const GptConfig& c) {
  std::string text = "[model]\nplugin = \"gpt\"\n";
  const auto line = [&](const char* key, const std::string& value) { text += std::string(key) + " = " + value + "\n"; };
  const auto truth = [](bool value) { return std::string(value ? "true" : "false"); };
  line("layers", std::to_string(c.layers));
  line("hidden", std::to_string(c.hidden));
  line("heads", std::to_string(c.heads));
  line("kv_heads", std::to_string(c.kv_heads));
  line("head_size", std::to_string(c.head_size));
  line("ffn", std::to_string(c.ffn));
  line("vocabulary", std::to_string(c.vocabulary));
  line("context", std::to_string(c.context));
  line("positions", "\"" + c.positions + "\"");
  line("rotary_base", number_text(c.rotary_base));
  line("norm", "\"" + c.norm + "\"");
  line("norm_epsilon", number_text(c.norm_epsilon));
  line("activation", "\"" + c.activation + "\"");
  line("bias", truth(c.bias));
  line("qkv_bias", truth(c.qkv_bias));
  line("tied", truth(c.tied));
  line("dropout", number_text(c.dropout));
  return text;
}

std::string gpt_to_external(const GptConfig& c) {
  const Family family = family_of(c);
  Json::Object o;
  if (family == Family::gpt2) {
    o = {{"architectures", Json::Array{"GPT2LMHeadModel"}},
         {"model_type", "gpt2"},
         {"n_layer", c.layers},
         {"n_embd", c.hidden},
         {"n_head", c.heads},
         {"n_inner", c.ffn},
         {"n_positions", c.context},
         {"vocab_size", c.vocabulary},
         {"activation_function", std::string(std::find_if(std::begin(kGpt2Activations), std::end(kGpt2Activations),
                                                          [&](const auto& n) { return n.ours == c.activation; })
                                                 ->theirs)},
         {"layer_norm_epsilon", c.norm_epsilon},
         {"resid_pdrop", c.dropout},
         {"embd_pdrop", c.dropout},
         {"attn_pdrop", 0.0}};
  } else {
    const bool qwen = family == Family::qwen2;
    o = {{"architectures", Json::Array{qwen ? "Qwen2ForCausalLM" : "LlamaForCausalLM"}},
         {"model_type", qwen ? "qwen2" : "llama"},
         {"num_hidden_layers", c.layers},
         {"hidden_size", c.hidden},
         {"num_attention_heads", c.heads},
         {"num_key_value_heads", c.kv_heads},
         {"head_dim", c.head_size},
         {"intermediate_size", c.ffn},
         {"vocab_size", c.vocabulary},
         {"max_position_embeddings", c.context},
         {"rms_norm_eps", c.norm_epsilon},
         {"rope_theta", c.rotary_base},
         {"hidden_act", "silu"}};
    if (qwen)
      o.emplace_back("use_sliding_window", false);
    else
      o.emplace_back("attention_bias", false);
  }
  o.emplace_back("tie_word_embeddings", c.tied);
  o.emplace_back("torch_dtype", "float32");
  return Json(std::move(o)).dump(2) + "\n";
}

std::vector<ExternalTensor> gpt_external_tensors(const GptConfig& c) {
  Mapping mapping(c);
  if (family_of(c) == Family::gpt2)
    map_gpt2(c, mapping);
  else
    map_llama(c, mapping);
  // Tied: a second name of the embedding, which files may have or not.
  mapping.whole("lm_head.weight", c.tied ? "embedding.weight" : "head.weight", c.vocabulary, c.hidden);
  return mapping.tensors;
}
