// Hugging Face folders without torch: random models there and back, second names, what is passed over and what is
// refused. Against transformers itself: tests/reference/check_external.py.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <random>

#include "engine/checkpoint/external_export.h"
#include "engine/checkpoint/external_files.h"
#include "engine/checkpoint/external_import.h"
#include "engine/checkpoint/safetensors_writer.h"
#include "strata/convert.h"
#include "strata/json.h"
#include "tests/harness.h"

namespace strata::external_test {
namespace {

namespace fs = std::filesystem;

std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

struct Model {
  explicit Model(const std::string& config) : plugin(load_plugin("gpt", {})) {
    plugin->import_config(config);
    mapping = plugin->external_tensors();
    const NamedPlugin named{"gpt", &*plugin};
    const BuiltProgram built = build_program({&named, 1}, {1, 1, 1}, Goal::logits);
    for (TensorId id : built.program.with_role(Role::parameter))
      shapes[built.program[id].name] = built.program[id].shape;
  }
  LoadedPlugin plugin;
  std::vector<ExternalTensor> mapping;
  std::map<std::string, Shape> shapes;
};

// Tensors of a folder as bytes, to be written in one file or some.
struct Tensors {
  struct Entry {
    DType dtype;
    Shape shape;
    std::vector<std::byte> bytes;
  };
  std::map<std::string, Entry> entries;

  void add(const std::string& name, DType dtype, const Shape& shape, const std::vector<float>& values) {
    Entry entry{dtype, shape, std::vector<std::byte>(values.size() * size_t(size_of(dtype)))};
    from_f32(dtype, values.data(), entry.bytes.data(), int64_t(values.size()));
    entries[name] = std::move(entry);
  }
  void write(const std::string& folder, const std::string& config, int files = 1) const {
    fs::create_directories(folder);
    test::write_file(folder + "/config.json", config);
    std::vector<std::vector<TensorToStore>> shards(size_t(files), std::vector<TensorToStore>{});
    std::string map;
    size_t next = 0;
    for (const auto& [name, entry] : entries) {
      const size_t shard = next++ % size_t(files);
      shards[shard].push_back({name, entry.dtype, entry.shape, entry.bytes.data()});
      map += (map.empty() ? "\"" : ",\"") + name + "\":\"part " + std::to_string(shard) + ".safetensors\"";
    }
    if (files == 1) return write_safetensors(folder + "/model.safetensors", shards[0], {});
    for (size_t i = 0; i < shards.size(); ++i)
      write_safetensors(folder + "/part " + std::to_string(i) + ".safetensors", shards[i], {});
    test::write_file(folder + "/model.safetensors.index.json", "{\"weight_map\":{" + map + "}}");
  }
};

std::vector<float> random_values(std::mt19937& random, const Shape& shape) {
  std::normal_distribution<float> normal;
  std::vector<float> values(size_t(elements(shape)));
  for (float& value : values) value = normal(random);
  return values;
}

// What a model has, all but second names.
Tensors random_tensors(std::mt19937& random, const Model& model, DType dtype) {
  Tensors tensors;
  std::vector<const ExternalTensor*> before;
  for (const ExternalTensor& tensor : model.mapping) {
    if (tensor.rows.empty() ||
        std::any_of(before.begin(), before.end(), [&](const auto* other) { return same_rows(*other, tensor); }))
      continue;
    before.push_back(&tensor);
    tensors.add(tensor.name, dtype, tensor.shape, random_values(random, tensor.shape));
  }
  return tensors;
}

std::map<std::string, std::vector<float>> import_all(const std::string& folder, const Model& model) {
  const ExternalFolder opened(folder);
  const ExternalImport tensors(opened, model.mapping, model.shapes);
  std::map<std::string, std::vector<float>> values;
  for (const auto& [name, shape] : model.shapes) {
    values[name].assign(size_t(elements(shape)), NAN);
    tensors.read(name, values[name].data());
  }
  return values;
}

std::string random_config(std::mt19937& random) {
  const auto number = [&](int low, int high) { return low + int(random() % unsigned(high - low + 1)); };
  const int family = number(0, 2), heads = number(1, 4), head = 2 * number(1, 10);
  const auto text = [](int64_t value) { return std::to_string(value); };
  const std::string common =
      ",\"vocab_size\":" + text(number(3, 90)) + ",\"tie_word_embeddings\":" + (random() % 2 ? "true" : "false") + "}";
  if (family == 0)
    return "{\"model_type\":\"gpt2\",\"n_layer\":" + text(number(1, 3)) + ",\"n_head\":" + text(heads) +
           ",\"n_embd\":" + text(heads * head) + ",\"n_inner\":" + text(number(1, 70)) +
           ",\"n_positions\":" + text(number(1, 40)) + common;
  const int group = number(1, heads);
  return std::string("{\"model_type\":\"") + (family == 1 ? "llama" : "qwen2") +
         "\",\"num_hidden_layers\":" + text(number(1, 3)) + ",\"num_attention_heads\":" + text(heads) +
         ",\"num_key_value_heads\":" + text(heads % group == 0 ? group : 1) + ",\"head_dim\":" + text(head) +
         ",\"hidden_size\":" + text(number(1, 60)) + ",\"intermediate_size\":" + text(number(1, 70)) +
         ",\"max_position_embeddings\":16" + common;
}

// Every tensor comes back: as it was, or rounded once.
TEST(External, RandomModelsThereAndBack) {
  const unsigned seed = 20;
  std::mt19937 random(seed);
  for (size_t round = 0; round < 40; ++round) {
    if (test::left_out(round)) continue;
    const DType stored = DType(random() % 2 ? 0 : 2 + random() % 2),
                wanted = DType(random() % 2 ? 0 : 2 + random() % 2);
    const std::string config = random_config(random);
    SCOPED_TRACE("round " + std::to_string(round) + ": " + config);
    const Model model(config);
    const Tensors tensors = random_tensors(random, model, stored);
    test::TemporaryFolder folder;
    tensors.write(folder / "theirs", config, 1 + int(random() % 4));
    const auto values = import_all(folder / "theirs", model);
    fs::create_directory(folder / "ours");
    export_tensors(folder / "ours", model.mapping, model.shapes,
                   [&](const std::string& name, float* out) { std::ranges::copy(values.at(name), out); },
                   {wanted, random() % 2 ? 5'000'000'000 : 4096});
    test::write_file(folder / "ours/config.json", config);
    const ExternalFolder ours(folder / "ours");
    EXPECT_EQ(ours.tensors().size(), tensors.entries.size());
    for (const auto& [name, entry] : tensors.entries) {
      const auto& found = ours.tensors().at(name);
      EXPECT_EQ(found.tensor.dtype, wanted);
      EXPECT_EQ(found.tensor.shape, entry.shape);
      std::vector<std::byte> want(size_t(elements(entry.shape) * size_of(wanted)));
      convert(stored, entry.bytes.data(), wanted, want.data(), elements(entry.shape));
      EXPECT_EQ(found.file->read(found.tensor), want) << name;
    }
  }
}

const std::string kTied = R"({"model_type":"llama","num_hidden_layers":1,"num_attention_heads":3,"hidden_size":60,)"
                          R"("intermediate_size":7,"vocab_size":11,"tie_word_embeddings":true})";

TEST(External, TiedOutputLayers) {
  std::mt19937 random(1);
  const Model model(kTied);
  Tensors tensors = random_tensors(random, model, DType::bf16);
  test::TemporaryFolder folder;
  const auto difference = [&](const char* name) {
    tensors.write(folder / name, kTied);
    const ExternalFolder opened(folder / name);
    return ExternalImport(opened, model.mapping, model.shapes).differing_second_name();
  };
  EXPECT_EQ(difference("absent"), "");
  const auto want = import_all(folder / "absent", model);
  tensors.entries["lm_head.weight"] = tensors.entries.at("model.embed_tokens.weight");
  EXPECT_EQ(difference("same"), "");
  EXPECT_EQ(import_all(folder / "same", model), want);
  tensors.entries["lm_head.weight"].bytes.back() ^= std::byte{1};
  EXPECT_EQ(difference("different"), "lm_head.weight");
  tensors.entries["lm_head.weight"].bytes.back() ^= std::byte{1};
  tensors.entries.erase("model.embed_tokens.weight");  // stored under the other name alone
  EXPECT_EQ(difference("other name"), "");
  EXPECT_EQ(import_all(folder / "other name", model), want);
}

TEST(External, WhatIsPassedOver) {
  std::mt19937 random(2);
  const Model model(kTied);
  Tensors tensors = random_tensors(random, model, DType::f32);
  test::TemporaryFolder folder;
  tensors.write(folder / "plain", kTied);
  const auto want = import_all(folder / "plain", model);
  tensors.add("model.layers.0.self_attn.rotary_emb.inv_freq", DType::f32, {2}, {1, 2});
  tensors.add("model.rotary_emb.inv_freq", DType::f32, {2}, {1, 2});
  tensors.entries["model.position_ids"] = {DType::i32, {1}, std::vector<std::byte>(4)};
  tensors.entries["model.mask"] = {DType::u8, {3}, std::vector<std::byte>(3)};
  tensors.write(folder / "more", kTied, 2);
  EXPECT_EQ(import_all(folder / "more", model), want);
}

// Each wrong folder gives its own message.
TEST(External, Refusals) {
  std::mt19937 random(3);
  const Model model(kTied);
  const Tensors good = random_tensors(random, model, DType::f32);
  test::TemporaryFolder folder;
  int cases = 0;
  const auto refused = [&](const std::function<void(Tensors&)>& change, const std::function<void(std::string)>& spoil,
                           int files = 2) {
    Tensors tensors = good;
    if (change) change(tensors);
    const std::string path = folder / std::to_string(++cases);
    tensors.write(path, kTied, files);
    if (spoil) spoil(path);
    std::string message = message_of([&] { import_all(path, model); });
    for (size_t at; (at = message.find(path)) != std::string::npos;) message.replace(at, path.size(), "F");
    return message;
  };
  EXPECT_EQ(refused({}, {}), "");
  const auto index = "/model.safetensors.index.json";
  EXPECT_EQ(refused({}, [](std::string f) { fs::remove(f + "/config.json"); }),
            "F: holds no config.json; expected a Hugging Face model folder.");
  EXPECT_EQ(refused({}, [](std::string f) { fs::remove(f + "/part 1.safetensors"); }),
            "F/model.safetensors.index.json: names part 1.safetensors, which is not in the folder.");
  EXPECT_EQ(refused({}, [](std::string f) { fs::resize_file(f + "/part 1.safetensors", 0); }),
            "F/part 1.safetensors: is no safetensors file: it has 0 bytes.");
  EXPECT_NE(refused({},
                    [](std::string f) {
                      fs::resize_file(f + "/part 1.safetensors", fs::file_size(f + "/part 1.safetensors") - 1);
                    })
                .find("the file is truncated or damaged."),
            std::string::npos);
  for (const uint64_t length : {uint64_t{1} << 63, UINT64_MAX, UINT64_MAX - 7})
    EXPECT_NE(refused({},
                      [&](std::string f) {
                        std::fstream file(f + "/part 0.safetensors");
                        file.write(reinterpret_cast<const char*>(&length), 8);
                      })
                  .find("its header claims " + std::to_string(length) + " bytes"),
              std::string::npos);
  EXPECT_EQ(refused({},
                    [](std::string f) {
                      fs::remove(f + "/part 0.safetensors");
                      fs::create_directory(f + "/part 0.safetensors");
                    }),
            "F/part 0.safetensors: is not a regular file.");
  EXPECT_EQ(refused({},
                    [](std::string f) {
                      fs::remove(f + "/part 0.safetensors");
                      fs::create_symlink("nowhere", f + "/part 0.safetensors");
                    }),
            "F/part 0.safetensors: cannot open it: No such file or directory.");
  EXPECT_EQ(refused({}, [&](std::string f) { test::write_file(f + index, "{\"weight_map\":{}}"); }),
            "F/model.safetensors.index.json: its \"weight_map\" names no tensor.");
  EXPECT_EQ(refused({}, [&](std::string f) { test::write_file(f + index, ""); }),
            "F/model.safetensors.index.json: is not JSON from byte 1 on.");
  for (const char* name : {"../x", "..", "", "/etc/passwd"})
    EXPECT_EQ(refused({},
                      [&](std::string f) {
                        test::write_file(f + index, std::string("{\"weight_map\":{\"a\":\"") + name + "\"}}");
                      }),
              std::string("F/model.safetensors.index.json: names \"") + name + "\", which is no file of this folder.");
  EXPECT_EQ(refused({}, [](std::string f) { fs::copy(f + "/part 0.safetensors", f + "/model.safetensors"); }),
            "F: holds model.safetensors and, by model.safetensors.index.json, part 0.safetensors: two models. Remove "
            "the files of one.");
  EXPECT_NE(refused({},
                    [](std::string f) {
                      fs::remove(f + "/part 1.safetensors");
                      fs::copy(f + "/part 0.safetensors", f + "/part 1.safetensors");
                    })
                .find("is in two files, part 0.safetensors and part 1.safetensors."),
            std::string::npos);
  EXPECT_EQ(refused(
                {},
                [](std::string f) {
                  fs::remove(f + "/model.safetensors");
                  test::write_file(f + "/pytorch_model.bin", "");
                },
                1),
            "F: holds pytorch_model.bin but no model.safetensors; transformers' save_pretrained turns it into "
            "safetensors.");
  EXPECT_EQ(refused([](Tensors& t) { t.entries.erase("model.norm.weight"); }, {}),
            "F: lacks the tensor \"model.norm.weight\".");
  EXPECT_EQ(refused([](Tensors& t) { t.add("model.extra", DType::f32, {1}, {1}); }, {}),
            "F: holds the tensor \"model.extra\" that this architecture does not have.");
  EXPECT_EQ(refused([](Tensors& t) { t.add("model.norm.weight", DType::f32, {1}, {1}); }, {}, 1),
            "F/model.safetensors: tensor \"model.norm.weight\" is (1), but config.json makes it (60).");
  EXPECT_EQ(refused(
                [](Tensors& t) {
                  t.entries["model.norm.weight"] = {DType::f64, {60}, std::vector<std::byte>(480)};
                },
                {}, 1),
            "F/model.safetensors: tensor \"model.norm.weight\" has dtype F64; expected F32, BF16 or F16.");
}

TEST(External, WhatDoesNotFitTheDtypeIsRefused) {
  const ExternalTensor tensor{"there", {2, 2}, false, {{0, "here", 0, 2}}};
  test::TemporaryFolder folder;
  const auto message = [&](DType dtype, float value) {
    return message_of([&] {
      export_tensors(folder.path(), {tensor}, {{"here", {2, 2}}},
                     [&](const std::string&, float* out) { std::fill_n(out, 4, value); }, {dtype, 1000});
    });
  };
  EXPECT_EQ(message(DType::f16, 65519.99f), "");  // rounds to 65504
  EXPECT_EQ(message(DType::f16, INFINITY), "");
  EXPECT_EQ(message(DType::f16, -65520),
            "the tensor \"there\" holds -65520, which is infinite in f16; export with another --dtype.");
  EXPECT_EQ(message(DType::bf16, 0x1.FEFFFEp127f), "");
  EXPECT_NE(message(DType::bf16, 0x1.FFp127f), "");
}

TEST(External, ConfigurationsGivenBack) {
  const std::string ours =
      R"({"model_type":"llama","hidden_size":8,"tie_word_embeddings":false,"torch_dtype":"float32"})";
  const std::string kept =
      R"({"model_type":"llama","hidden_size":8,"eos_token_id":[1,2],"other":{"a":1.5},"dtype":"float16",)"
      R"("tie_word_embeddings":true})";
  const auto config = [&](const std::optional<std::string>& from, bool same) {
    return Json::parse(exported_config(ours, from, same, DType::bf16), "exported").dump();
  };
  EXPECT_EQ(config({}, false),
            R"({"model_type":"llama","hidden_size":8,"tie_word_embeddings":false,"torch_dtype":"bfloat16"})");
  EXPECT_EQ(config(kept, true), R"({"hidden_size":8,"eos_token_id":[1,2],"other":{"a":1.5},"model_type":"llama",)"
                                R"("tie_word_embeddings":false,"dtype":"bfloat16"})");
  EXPECT_EQ(
      config(kept, false),
      R"({"model_type":"llama","hidden_size":8,"tie_word_embeddings":false,"eos_token_id":[1,2],"dtype":"bfloat16"})");
}

TEST(External, ConfigurationsRefused) {
  const auto message = [](const std::string& config) {
    return message_of([&] { load_plugin("gpt", {})->import_config(config); });
  };
  const std::string gpt2 = R"("model_type":"gpt2","n_layer":1,"n_embd":8,"vocab_size":4)";
  EXPECT_EQ(message("{" + gpt2 + ",\"n_head\":2}"), "");
  EXPECT_EQ(message("{" + gpt2 + "}"), "config.json lacks \"n_head\".");
  EXPECT_EQ(message("{" + gpt2 + ",\"n_head\":0}"), "config.json: \"n_head\" is 0; expected 1 to 2147483648.");
  EXPECT_EQ(message("{" + gpt2 + ",\"n_head\":-4}"), "config.json: \"n_head\" is -4; expected 1 to 2147483648.");
  EXPECT_EQ(message("{" + gpt2 + ",\"n_head\":2.5}"), "config.json: \"n_head\" must be an integer.");
  EXPECT_EQ(message("{" + gpt2 + ",\"n_head\":2,\"resid_pdrop\":1.5}"),
            "config.json: \"resid_pdrop\" is 1.5; expected 0 to 0.99.");
  EXPECT_NE(load_plugin("gpt", {})->import_config("{" + gpt2 + ",\"n_head\":2}")->find("dropout = 0.1\n"),
            std::string::npos);  // what transformers takes where nothing is said
}

}  // namespace
}  // namespace strata::external_test
