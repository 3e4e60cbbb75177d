// A folder is as it was, or has all that was written: files, and folders made on the way.
#include "memory/staged_folder.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "engine/plugin/testing.h"
#include "tests/harness.h"

namespace strata::staged_folder_test {
namespace {

namespace fs = std::filesystem;

TEST(StagedFolder, IsAsItWasOrHasAll) {
  test::TemporaryFolder folder;
  const std::string target = folder / "a/b c";
  { StagedFolder unfinished(target); }
  EXPECT_FALSE(fs::exists(folder / "a"));
  {
    StagedFolder staged(target);
    EXPECT_EQ(test::message_of([&] { StagedFolder second(target); }),
              target + ": another strata command is writing into this folder; wait for it or name another one.");
    test::write_file(staged.path() + "/config.json", "1");
    test::write_file(staged.path() + "/weights", "1");
    EXPECT_FALSE(fs::exists(target + "/weights"));
    staged.publish("config.json", [](const std::string&) { return false; });
  }
  fs::create_directory(target + "/.unfinished-killed");
  test::write_file(target + "/README", "kept");
  test::write_file(target + "/weights-2", "old");
  const auto names = [&] {
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator(target)) found.insert(entry.path().filename().string());
    return found;
  };
  const auto replaced = [](const std::string& name) { return name != "README" && name != "in the way"; };
  fs::create_directories(target + "/in the way/full");
  {
    StagedFolder staged(target);
    test::write_file(staged.path() + "/config.json", "2");
    test::write_file(staged.path() + "/in the way", "2");
    EXPECT_THROW(staged.publish("config.json", replaced), Error);
  }
  EXPECT_EQ(names(), (std::set<std::string>{"README", "config.json", "in the way", "weights", "weights-2"}));
  {
    StagedFolder staged(target);
    test::write_file(staged.path() + "/config.json", "3");
    staged.publish("config.json", replaced);
  }
  EXPECT_EQ(names(), (std::set<std::string>{"README", "config.json", "in the way"}));
  test::write_file(folder / "file", "");
  EXPECT_EQ(test::message_of([&] { StagedFolder staged(folder / "file"); }),
            (folder / "file") + ": cannot write into it: Not a directory.");
}

}  // namespace
}  // namespace strata::staged_folder_test
