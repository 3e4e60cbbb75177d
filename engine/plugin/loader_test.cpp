// Finding plugins and refusing files that are none. Libraries that load but do not fit: tests/out_of_tree.sh.
#include "engine/plugin/loader.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "engine/plugin/exported_symbols.h"
#include "engine/plugin/testing.h"

namespace strata::loader_test {
namespace {

namespace fs = std::filesystem;
using test::message_of;

std::string bytes_of(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

class Loader : public ::testing::Test {
 protected:
  Loader() {
    std::string pattern = (fs::temp_directory_path() / "strata_loader_XXXXXX").string();
    if (!mkdtemp(pattern.data())) throw std::runtime_error("mkdtemp failed");
    folder_ = pattern;
  }
  ~Loader() override { fs::remove_all(folder_); }
  std::string write(const std::string& name, const std::string& content) {
    std::ofstream(folder_ / name, std::ios::binary) << content;
    return (folder_ / name).string();
  }
  std::string message(const std::string& name) {
    return message_of([&] { load_plugin(name, {folder_.string()}); });
  }
  fs::path folder_;
  const std::string library_ = std::string(STRATA_BINARY_DIR) + "/lib/libstrata.so";
  const std::string plugin_ = std::string(STRATA_BINARY_DIR) + "/lib/strata/plugins/clip.so";
};

TEST_F(Loader, RefusesWhatIsNoPlugin) {
  const std::string text = write("text.so", "not a library\n"), empty = write("empty.so", "");
  EXPECT_EQ(message("text"), text + ": is not a shared library, so it cannot be a plugin.");
  EXPECT_EQ(message("empty"), empty + ": is not a shared library, so it cannot be a plugin.");
  fs::copy_file(library_, folder_ / "other.so");
  EXPECT_EQ(message("other"), (folder_ / "other.so").string() +
                                  ": is a shared library, but not a Strata plugin (it has no STRATA_PLUGIN line).");
  fs::create_directory(folder_ / "folder.so");
  EXPECT_EQ(message("folder"), (folder_ / "folder.so").string() + ": is not a regular file.");
  const std::string whole = bytes_of(plugin_), cut = write("cut.so", whole.substr(0, whole.size() - 64));
  EXPECT_EQ(message("cut"), cut + ": is a damaged shared library: its section headers reach beyond its end.");
}

TEST_F(Loader, ALibraryUnderAnotherName) {
  fs::copy_file(plugin_, folder_ / "clap.so");
  EXPECT_EQ(message("clap"), (folder_ / "clap.so").string() + ": holds the plugin \"clip\"; name the file clip.so.");
}

TEST_F(Loader, NamesThatAreNoFiles) {
  fs::copy_file(plugin_, folder_ / "x.so");
  fs::create_directory(folder_ / "sub");
  for (const std::string& name : {std::string("sub/../x"), std::string(), std::string(5000, 'a')})
    EXPECT_EQ(message(name).rfind("no plugin is named \"" + name + "\".", 0), 0u) << message(name);
  EXPECT_NE(message("clop").find("Did you mean \"clip\"?"), std::string::npos) << message("clop");
}

TEST_F(Loader, LoadsAndListsWhatIsThere) {
  const LoadedPlugin plugin = load_plugin("clip", {});
  EXPECT_EQ(plugin.name(), "clip");
  EXPECT_FALSE(plugin.summary().empty());
  write("mine.so", "");
  const auto names = plugin_names({folder_.string(), "/nowhere"});
  for (const char* name : {"adamw", "clip", "gpt", "mine"})
    EXPECT_EQ(std::count(names.begin(), names.end(), name), 1) << name;
  EXPECT_EQ(plugins_providing("model", {folder_.string()}), std::vector<std::string>{"gpt"});
}

TEST_F(Loader, PluginsOfAConfiguration) {
  const auto load = [](const std::string& text) {
    return message_of([&] { load_plugins(Config::parse(text, "c.toml", {}), {}); });
  };
  EXPECT_EQ(load("[run]\n"),
            "c.toml: there is no [model] table; it says what to train: plugin = NAME (installed: gpt).");
  EXPECT_EQ(
      load("[model]\n"),
      "c.toml:1:1: [model] lacks the key \"plugin\" (string): the plugin that builds the model (installed: gpt).");
  EXPECT_EQ(load("[model]\nplugin = 3\n"), "c.toml:2:10: model.plugin must be a string.");
  EXPECT_EQ(load("[model]\nplugin = \"gpt\"\n[plugins.gpt]\n"),
            "c.toml:3:1: \"gpt\" is the model; its options belong into [model].");
  EXPECT_EQ(load("[model]\nplugin = \"gpt\"\n[plugins]\nclip = 1\n"),
            "c.toml:4:8: \"clip\" must be a table, but it is an integer; write [plugins.clip].");
  EXPECT_EQ(load("[model]\nplugin = \"gpt\"\n[plugins.clop]\n")
                .rfind("c.toml:3:1: no plugin is named \"clop\". Did you mean \"clip\"? Searched: ", 0),
            0u);
  const auto plugins =
      load_plugins(Config::parse("[model]\nplugin = \"gpt\"\n[plugins.schedule]\n[plugins.adamw]\n", "c.toml", {}), {});
  ASSERT_EQ(plugins.size(), 3u);
  EXPECT_EQ(plugins[0].name() + " " + plugins[1].name() + " " + plugins[2].name(), "gpt schedule adamw");
}

// A plugin that registers a kind in its constructor may be made any number of times; the kind stays that plugin's.
struct Registers : Plugin {
  Registers() {
    register_kind({.name = "test_of_a_plugin", .summary = "", .shape = [](const OpView& v) {
                     return std::vector<TensorSpec>{{v.input(0).shape, DType::f32}};
                   }});
  }
};

TEST(Registering, APluginMayBeMadeAnyNumberOfTimes) {
  const auto entry = [](const char* name) {
    return PluginEntry{sizeof(PluginEntry),
                       STRATA_FINGERPRINT,
                       name,
                       "1",
                       "",
                       []() -> Plugin* { return new Registers; },
                       [](Plugin* plugin) { delete plugin; }};
  };
  const PluginEntry first = entry("first"), second = entry("second");
  const LoadedPlugin once(first, "first.so"), again(first, "first.so");
  const OpKind& kind = find_kind("test_of_a_plugin");
  const LoadedPlugin third(first, "first.so");
  EXPECT_EQ(&kind, &find_kind("test_of_a_plugin"));
  EXPECT_EQ(message_of([&] { LoadedPlugin(second, "second.so"); }),
            "plugin \"second\" (second.so) threw while it was made: op kind \"test_of_a_plugin\" is registered twice, "
            "first by plugin \"first\"; give the new kind another name.");
  EXPECT_EQ(message_of([] { Registers(); }),
            "op kind \"test_of_a_plugin\" is registered twice, first by plugin \"first\"; give the new kind another "
            "name.");
  EXPECT_EQ(message_of([] { register_kind({.name = "gelu", .summary = "", .shape = find_kind("gelu").shape}); }),
            "op kind \"gelu\" is registered twice, first by the engine; give the new kind another name.");
}

// Headers that lie must not make the reader leave the file: bytes changed at random, cuts at random lengths. A
// read beyond the mapped pages ends the test; one of less than a page stays unseen.
TEST_F(Loader, DamagedLibrariesNeverReadOutOfBounds) {
  const uint32_t seed = 20261;
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const std::string whole = bytes_of(plugin_);
  const size_t sections = whole.size() - std::min<size_t>(whole.size(), 3000);
  for (int round = 0; round < 300; ++round) {
    std::string damaged = whole;
    for (int i = 0; i < 4; ++i)
      damaged[round % 2 ? random() % 64 : sections + random() % (whole.size() - sections)] = char(random());
    if (round % 3 == 0) damaged.resize(random() % damaged.size());
    const std::string path = write("damaged.so", damaged);
    message_of([&] { exported_symbols(path); });
  }
}

}  // namespace
}  // namespace strata::loader_test
