// The decoder-only transformer as a plugin: GPT-2 and the Llama and Qwen2.5 family by options.
// Builds the forward program of one microbatch from modules that other plugins may replace or wrap; the exchange with
// Hugging Face files is in external.h.
#include <cmath>

#include "plugins/gpt/external.h"
#include "plugins/gpt/gpt_config.h"
#include "strata/plugin.h"
#include "strata/random.h"

namespace {

using strata::Builder;
using strata::Dimension;
using strata::Dimensions;
using strata::Error;
using strata::Initializer;
using strata::TensorId;

class Gpt final : public strata::Plugin {
 public:
  void options(strata::Options& o) override {
    constexpr double most = double(kMostOfASize);
    o.add("layers", config_.layers, "transformer blocks").range(1, double(kMostLayers));
    o.add("hidden", config_.hidden, "width of the residual stream").range(1, most);
    o.add("heads", config_.heads, "query heads").range(1, most);
    o.add("kv_heads", config_.kv_heads, "key and value heads (grouped-query attention); 0: as many as heads")
        .range(0, most);
    o.add("head_size", config_.head_size, "width of one head; 0: hidden / heads").range(0, most);
    o.add("ffn", config_.ffn, "inner width of the feed-forward layer; 0: 4 x hidden").range(0, most);
    o.add("vocabulary", config_.vocabulary, "number of token ids").range(1, most);
    o.add("context", config_.context, "longest sequence; the rows of learned positions")
        .range(1, most)
        .unit("tokens")
        .may_change();  // learned positions are a tensor, whose shape is compared anyway
    o.add("positions", config_.positions, "how positions enter").choices({"learned", "rotary"});
    o.add("rotary_base", config_.rotary_base, "base of the rotary angles (arXiv 2104.09864)").positive();
    o.add("norm", config_.norm, "normalization before each branch").choices({"layer_norm", "rms_norm"});
    o.add("norm_epsilon", config_.norm_epsilon, "added to the variance").positive();
    o.add("activation", config_.activation,
          "feed-forward nonlinearity: gelu in its tanh form, swiglu (arXiv 2002.05202), relu or squared_relu")
        .choices({"gelu", "swiglu", "relu", "squared_relu"});
    o.add("bias", config_.bias, "biases on all linear layers");
    o.add("qkv_bias", config_.qkv_bias, "biases on query, key and value alone, when bias is off");
    o.add("tied", config_.tied, "output layer shares the embedding");
    o.add("dropout", config_.dropout,
          "probability of dropping an element of the embedding and of both branches' outputs")
        .range(0, 0.99)
        .may_change();
  }

  strata::Capabilities capabilities() const override { return {.provides = {"model"}}; }

  void model(strata::ModelStage& stage) override {
    resolve();
    stage.declare_vocabulary(config_.vocabulary);
    const auto& batch = stage.batch();
    if (config_.positions == "learned" && batch.sequence_length > config_.context)
      throw Error("the sequence length " + std::to_string(batch.sequence_length) + " exceeds the model's context of " +
                  std::to_string(config_.context) + "; lower data.sequence_length or raise model.context.");
    dropout_ = stage.goal() == strata::Goal::train ? config_.dropout : 0;
    stage.define("embedding", [this](Builder& b, TensorId tokens) { return embedding(b, tokens); });
    stage.define("attention", [this](Builder& b, TensorId x) { return attention(b, x); });
    stage.define("mlp", [this, &stage](Builder& b, TensorId x) { return mlp(b, x, stage); });
    // From the normalized input of "mlp" to its result before dropout.
    stage.define("feed_forward", [this](Builder& b, TensorId normed) { return feed_forward(b, normed); });
    // "attention" and "mlp" are the branches, from the residual stream to what is added to it.
    stage.define("block", [&stage](Builder& b, TensorId x) {
      x = residual(b, b.add_onto(x, stage.call("attention", b, x)));
      return residual(b, b.add_onto(x, stage.call("mlp", b, x)));
    });
    stage.define("head", [this, &stage](Builder& b, TensorId x) { return head(b, x, stage); });
    stage.define("model", [this, &stage](Builder& b, TensorId) {
      const TensorId tokens =
          b.data("tokens", {stage.batch().micro_batch, stage.batch().sequence_length}, strata::DType::i32, kTokens);
      TensorId x = stage.call("embedding", b, tokens);
      for (int64_t i = 0; i < config_.layers; ++i) {
        const auto scope = b.block("block." + std::to_string(i), int(i));
        x = stage.call("block", b, x);
      }
      return stage.call("head", b, x);
    });
  }

  std::optional<std::string> import_config(std::string_view json) override {
    auto config = gpt_from_external(std::string(json));
    if (!config) return {};
    config_ = *config;
    resolve();
    return gpt_to_toml(config_);
  }
  std::optional<std::string> export_config() const override { return gpt_to_external(resolved()); }
  std::vector<strata::ExternalTensor> external_tensors() const override { return gpt_external_tensors(resolved()); }

 private:
  GptConfig resolved() const {
    GptConfig c = config_;
    if (c.kv_heads == 0) c.kv_heads = c.heads;
    if (c.ffn == 0) c.ffn = 4 * c.hidden;
    if (c.head_size == 0) {
      if (c.hidden % c.heads != 0)
        throw Error("model.hidden = " + std::to_string(c.hidden) + " is not divisible by model.heads = " +
                    std::to_string(c.heads) + "; choose a multiple, or set model.head_size.");
      c.head_size = c.hidden / c.heads;
    }
    if (c.heads % c.kv_heads != 0)
      throw Error("model.heads = " + std::to_string(c.heads) +
                  " is not divisible by model.kv_heads = " + std::to_string(c.kv_heads) + ".");
    if (!strata::countable({c.heads + 2 * c.kv_heads, c.head_size}))
      throw Error("model.heads = " + std::to_string(c.heads) + ", model.kv_heads = " + std::to_string(c.kv_heads) +
                  " and model.head_size = " + std::to_string(c.head_size) + " make more than the " +
                  std::to_string(strata::kMostElements) + " elements that a tensor may have.");
    if (c.positions == "rotary" && c.head_size % 2 != 0)
      throw Error("rotary positions need an even head size, but it is " + std::to_string(c.head_size) + ".");
    return c;
  }
  void resolve() { config_ = resolved(); }

  static Initializer normal(double standard_deviation) { return {Initializer::Kind::normal, standard_deviation}; }
  static constexpr double kStandardDeviation = 0.02;  // GPT-2's
  // Projections back into the residual stream are smaller, so that its variance does not grow with depth (GPT-2, 2.3).
  double residual_deviation() const { return kStandardDeviation / std::sqrt(2.0 * double(config_.layers)); }

  // Names of dimensions, which strategies split over axes of the mesh.
  inline static const Dimension kHidden = "hidden", kFfn = "ffn", kVocabulary = "vocabulary";
  inline static const Dimensions kTokens = {"batch", "time"};
  // What a key/value head serves stays together: its query heads, and in qkv its key and its value.
  int64_t queries_per_group() const { return config_.heads / config_.kv_heads; }
  Dimension qkv_heads() const { return {"heads", (queries_per_group() + 2) * config_.head_size}; }
  Dimension query_heads() const { return {"heads", queries_per_group() * config_.head_size}; }
  static TensorId residual(Builder& b, TensorId x) { return b.name_dimensions(x, {"batch", "time", kHidden}); }

  TensorId norm(Builder& b, TensorId x, std::string_view name) {
    const auto scope = b.scope(name);
    const TensorId weight = b.parameter("weight", {config_.hidden}, {Initializer::Kind::ones, 0}, {kHidden});
    const strata::Attributes epsilon{{"epsilon", config_.norm_epsilon}};
    if (config_.norm == "rms_norm") return b.emit("rms_norm", {x, weight}, epsilon, "out");
    return b.emit("layer_norm", {x, weight, b.parameter("bias", {config_.hidden}, {}, {kHidden})}, epsilon, "out");
  }

  struct Projection {
    std::string_view name;
    int64_t size;  // of the output
    Dimension out, in;
    bool bias;
    double deviation = kStandardDeviation;
    std::vector<int64_t> fused{};  // strata::Lasting
  };
  TensorId linear(Builder& b, TensorId x, const Projection& p) {
    const auto scope = b.scope(p.name);
    const TensorId weight = b.parameter("weight", {p.size, b[x].shape.back()}, normal(p.deviation), {p.out, p.in}),
                   offset = p.bias ? b.parameter("bias", {p.size}, {}, {p.out}) : TensorId{};
    for (TensorId id : {weight, offset})
      if (id) b.program()[id].lasting.change([&](strata::Lasting& lasting) { lasting.fused = p.fused; });
    return b.emit("linear", {x, weight, offset}, {}, "out");
  }

  TensorId drop(Builder& b, TensorId x, std::string_view site) {
    if (dropout_ == 0) return x;
    return b.emit("dropout", {x, b.scalar(strata::kSeedScalar), b.scalar(strata::kStepScalar)},
                  {{"probability", dropout_}, {"stream", int64_t(strata::stream_of(b.scoped(site)))}}, site);
  }

  // The product that ends a branch.
  TensorId back(Builder& b, TensorId x, std::string_view name, const Dimension& inner) {
    return linear(b, x, {name, config_.hidden, kHidden, inner, config_.bias, residual_deviation()});
  }

  TensorId embedding(Builder& b, TensorId tokens) {
    const TensorId weight = b.parameter("embedding.weight", {config_.vocabulary, config_.hidden},
                                        normal(kStandardDeviation), {kVocabulary, kHidden});
    TensorId positions;
    if (config_.positions == "learned")
      positions = b.parameter("positions.weight", {config_.context, config_.hidden}, normal(kStandardDeviation),
                              {"positions", kHidden});
    const TensorId x = b.emit("embedding", {tokens, weight, positions}, {}, "embedding.out");
    return residual(b, drop(b, residual(b, x), "embedding.dropout"));
  }

  // Llama and Qwen2 have matrices of their own for queries, keys and values; GPT-2 has one (c_attn).
  std::vector<int64_t> fused_rows() const {
    if (config_.positions == "learned") return {};
    const int64_t size = config_.head_size;
    return {queries_per_group() * size, size, size};
  }

  TensorId attention(Builder& b, TensorId x) {
    TensorId qkv = linear(b, norm(b, x, "norm1"),
                          {.name = "qkv",
                           .size = (config_.heads + 2 * config_.kv_heads) * config_.head_size,
                           .out = qkv_heads(),
                           .in = kHidden,
                           .bias = config_.bias || config_.qkv_bias,
                           .fused = fused_rows()});
    const strata::Attributes heads{{"head_size", config_.head_size}, {"queries_per_group", queries_per_group()}};
    if (config_.positions == "rotary") {
      strata::Attributes rotary = heads;
      rotary.set("base", config_.rotary_base);
      rotary.set("inverse", int64_t{0});
      qkv = b.emit("rotary", {qkv}, rotary);
    }
    const TensorId result = back(b, b.emit("attention", {qkv}, heads), "attention_output", query_heads());
    return drop(b, result, "attention_output.dropout");
  }

  TensorId mlp(Builder& b, TensorId x, const strata::ModelStage& stage) {
    const TensorId normed = norm(b, x, "norm2");
    const auto scope = b.scope("mlp");
    return drop(b, stage.call("feed_forward", b, normed), "down.dropout");
  }

  TensorId feed_forward(Builder& b, TensorId normed) {
    const auto into = [&](std::string_view name) {
      return linear(b, normed, {.name = name, .size = config_.ffn, .out = kFfn, .in = kHidden, .bias = config_.bias});
    };
    TensorId inner = into("up");
    if (config_.activation == "swiglu")
      inner = b.emit("swiglu", {into("gate"), inner});
    else
      inner = b.emit(config_.activation, {inner});
    return back(b, inner, "down", kFfn);
  }

  TensorId head(Builder& b, TensorId x, const strata::ModelStage& stage) {
    const auto& batch = stage.batch();
    TensorId normed = norm(b, x, "norm");
    const TensorId weight =
        b.parameter(config_.tied ? "embedding.weight" : "head.weight", {config_.vocabulary, config_.hidden},
                    normal(kStandardDeviation), {kVocabulary, kHidden});
    if (stage.goal() == strata::Goal::logits) return b.emit("linear", {normed, weight, {}}, {}, "logits");
    const TensorId targets = b.data("targets", {batch.micro_batch, batch.sequence_length}, strata::DType::i32, kTokens);
    const double tokens = double(batch.sequences() * batch.sequence_length);
    return b.emit("lm_head_loss", {normed, weight, targets}, {{"scale", 1 / tokens}}, "loss");
  }

  GptConfig config_;
  double dropout_ = 0;
};

}  // namespace

STRATA_PLUGIN(Gpt, "gpt", "1.0.0", "decoder-only transformer: GPT-2, Llama and Qwen2.5 by options")
