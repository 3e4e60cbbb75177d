// The NVMe tier: every byte comes back, on each way the system may offer; what a user can mend is said; nothing stays.
#include "memory/nvme_store.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <thread>

#include "memory/arena.h"
#include "memory/disk.h"
#include "strata/error.h"
#include "tests/random_cases.h"

namespace strata::nvme_store_test {
namespace {

constexpr int64_t kPage = kNvmeAlignment;

// A directory of its own, gone with the test.
class Directory {
 public:
  explicit Directory(const std::string& under = testing::TempDir()) {
    std::string pattern = under + "/nvme_store_XXXXXX";
    if (mkdtemp(pattern.data())) path_ = pattern;
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::string path_;
};

// Small blocks and few in flight, so that little data takes many rounds.
NvmeStore::Options options(const Directory& directory, NvmeStore::Faults faults = {}) {
  return {.directories = {directory.path()}, .bytes = 256 * kPage, .depth = 4, .block = 4 * kPage, .faults = faults};
}

// Whole pages of memory, which start at a page.
struct Buffer {
  explicit Buffer(int64_t bytes, uint32_t seed = 0) : arena(bytes) {
    std::mt19937 random(seed);
    for (int64_t i = 0; seed && i < bytes; ++i) arena.base()[i] = std::byte(random());
  }
  Arena arena;
  std::byte* data() const { return arena.base(); }
};

std::string message(const std::function<void()>& action, ExitCode code = ExitCode::usage) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  return "no error";
}

void expect_round_trips(const NvmeStore& store, uint32_t seed, int rounds = 200) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const int64_t pages = store.bytes() / kPage;
  NvmeStore::Channel channel = store.channel();
  const Buffer expected(store.bytes(), seed), read(store.bytes());
  channel.write(0, expected.data(), store.bytes(), "all");
  for (int round = 0; round < rounds; ++round) {
    const int64_t first = random() % pages, count = random() % (pages - first + 1);
    if (round % 2) {
      for (int64_t i = 0; i < count; ++i) expected.data()[(first + i) * kPage + random() % kPage] = std::byte(random());
      channel.write(first * kPage, expected.data() + first * kPage, count * kPage, "part");
    }
    std::memset(read.data(), 0, size_t(count * kPage));
    channel.read(first * kPage, read.data(), count * kPage, "part");
    ASSERT_EQ(std::memcmp(read.data(), expected.data() + first * kPage, size_t(count * kPage)), 0) << round;
  }
  channel.read(0, read.data(), store.bytes(), "all");
  EXPECT_EQ(std::memcmp(read.data(), expected.data(), size_t(store.bytes())), 0);
}

TEST(NvmeStore, RoundTripsAtRandomPlaces) {
  const Directory directory;
  const NvmeStore store(options(directory));
  expect_round_trips(store, 1);
}

TEST(NvmeStore, RoundTripsWithoutRingOrDirectInputOutput) {
  const Directory directory;
  for (int way = 1; way < 4; ++way) {
    const NvmeStore store(options(directory, {.request = {}, .no_ring = (way & 1) != 0, .no_direct = (way & 2) != 0}));
    EXPECT_EQ(store.note().find("io_uring is not available here") != std::string::npos, (way & 1) != 0);
    EXPECT_EQ(store.note().find("without direct I/O") != std::string::npos, !store.direct());
    EXPECT_TRUE((way & 2) == 0 || !store.direct());
    expect_round_trips(store, uint32_t(way));
  }
}

TEST(NvmeStore, RoundTripsInMemoryFileSystem) {
  if (!std::filesystem::is_directory("/dev/shm")) GTEST_SKIP() << "no /dev/shm here";
  const Directory directory("/dev/shm");
  const NvmeStore store(options(directory));
  EXPECT_TRUE(store.direct() || store.note().find("without direct I/O") != std::string::npos);
  expect_round_trips(store, 5);
}

TEST(NvmeStore, ContinuesShortTransfers) {
  for (bool no_ring : {false, true}) {
    std::atomic<int> calls = 0;
    // Whole pages, odd sizes and interruptions; never less than a page, which would be the end of the file.
    const auto shorten = [&](size_t, int64_t) {
      const int results[] = {0, int(kPage), -EINTR, int(2 * kPage + 1), -EAGAIN, int(3 * kPage - 1)};
      return results[calls++ % 6];
    };
    const Directory directory;
    // Buffered, as direct I/O refuses requests of odd sizes.
    const NvmeStore store(options(directory, {.request = shorten, .no_ring = no_ring, .no_direct = true}));
    expect_round_trips(store, 6);
    EXPECT_GT(calls, 1000);
  }
}

TEST(NvmeStore, FailedRequestsNameTheTensor) {
  for (bool no_ring : {false, true}) {
    std::atomic<bool> broken = false;
    const auto fail = [&](size_t, int64_t offset) { return broken && offset == 12 * kPage ? -EIO : 0; };
    const Directory directory;
    const NvmeStore store(options(directory, {.request = fail, .no_ring = no_ring}));
    NvmeStore::Channel channel = store.channel();
    const Buffer buffer(store.bytes(), 7), read(store.bytes());
    broken = true;
    const std::string end =
        " tensor \"blocks.3.weight\" at byte 49152 of the file there: " + std::string(strerror(EIO)) +
        ". Check the disk, or name another directory, and resume from the last checkpoint.";
    const std::string start = "the NVMe directory " + directory.path() + ": cannot ";
    EXPECT_EQ(message([&] { channel.write(0, buffer.data(), store.bytes(), "blocks.3.weight"); }, ExitCode::failed),
              start + "write" + end);
    EXPECT_EQ(message([&] { channel.read(0, read.data(), store.bytes(), "blocks.3.weight"); }, ExitCode::failed),
              start + "read" + end);
    // Nothing is left in flight: later transfers of the channel are whole.
    broken = false;
    expect_round_trips(store, 8);
    channel.write(0, buffer.data(), store.bytes(), "all");
    channel.read(0, read.data(), store.bytes(), "all");
    EXPECT_EQ(std::memcmp(read.data(), buffer.data(), size_t(store.bytes())), 0);
  }
}

TEST(NvmeStore, TransferWithoutProgressFails) {
  const Directory directory;
  const NvmeStore store(
      options(directory, {.request = [](size_t, int64_t) { return 512; }, .no_ring = false, .no_direct = true}));
  NvmeStore::Channel channel = store.channel();
  const Buffer buffer(kPage);
  EXPECT_NE(message([&] { channel.read(0, buffer.data(), kPage, "x"); }, ExitCode::failed).find(strerror(EIO)),
            std::string::npos);
}

TEST(NvmeStore, ChannelsRunAtOnce) {
  const Directory directory;
  const NvmeStore store(options(directory));
  const int64_t half = store.bytes() / 2;
  std::vector<NvmeStore::Channel> channels;  // made by one thread, used by others
  for (int i = 0; i < 2; ++i) channels.push_back(store.channel());
  std::atomic<int> wrong = 0;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&, i] {
        const Buffer read(half);
        for (uint32_t round = 0; round < 50; ++round) {
          const Buffer written(half, 1 + 2 * round + uint32_t(i));
          channels[size_t(i)].write(i * half, written.data(), half, "half");
          channels[size_t(i)].read(i * half, read.data(), half, "half");
          wrong += std::memcmp(read.data(), written.data(), size_t(half)) != 0;
        }
      });
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST(NvmeStore, RefusesWhatIsNoDirectory) {
  const Directory directory;
  auto wrong = options(directory);
  wrong.directories = {directory.path() + "/missing"};
  EXPECT_EQ(
      message([&] { NvmeStore store(wrong); }),
      "the NVMe directory " + wrong.directories[0] + ": No such file or directory. Create it, or name another one.");
  wrong.directories = {"/dev/null"};
  EXPECT_EQ(message([&] { NvmeStore store(wrong); }),
            "the NVMe directory /dev/null is not a directory. Name a directory.");
  wrong.directories = {"/proc"};  // takes nobody's files, not even root's
  EXPECT_NE(message([&] { NvmeStore store(wrong); }).find("the NVMe directory /proc is not writable: "),
            std::string::npos);
}

TEST(NvmeStore, RefusesReadOnlyDirectory) {
  if (geteuid() == 0) GTEST_SKIP() << "root may write everywhere";
  const Directory directory;
  std::filesystem::permissions(directory.path(),
                               std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  EXPECT_NE(message([&] { NvmeStore store(options(directory)); }).find(" is not writable: "), std::string::npos);
  std::filesystem::permissions(directory.path(), std::filesystem::perms::owner_all);
}

TEST(NvmeStore, RefusesSizeBeyondTheDisk) {
  const Directory directory;
  auto huge = options(directory);
  huge.bytes = int64_t(1) << 60;
  const std::string text = message([&] { NvmeStore store(huge); });
  EXPECT_EQ(
      text.find("the NVMe directory " + directory.path() + " cannot hold the 1024.00 PiB that offloading needs: "), 0u)
      << text;
  EXPECT_NE(text.find("B are free. Free some space, or name another one."), std::string::npos) << text;
  EXPECT_TRUE(directory.empty());
}

TEST(NvmeStore, DirectoryHasOneUserAndIsEmptyAfterwards) {
  const Directory directory;
  {
    const NvmeStore store(options(directory));
    EXPECT_EQ(message([&] { NvmeStore second(options(directory)); }),
              "the NVMe directory " + directory.path() + " is in use by another run (process " +
                  std::to_string(getpid()) +
                  " holds strata-nvme.lock). Wait until it ends, or name another directory.");
    expect_round_trips(store, 9);
  }
  EXPECT_TRUE(directory.empty());
  const NvmeStore next(options(directory));
  EXPECT_EQ(next.bytes(), 256 * kPage);
}

// Several directories, and a store over them; pages enough for a few rounds.
struct Several {
  explicit Several(size_t count) : directories(count) {
    for (const Directory& directory : directories) options.directories.push_back(directory.path());
    options.stripes = Stripes::even(count);
    options.bytes = int64_t(count) * 3 * Stripes::kPiece + 5 * kPage;
    options.depth = 4;
    options.block = 64 * kPage;
  }
  std::vector<Directory> directories;
  NvmeStore::Options options{.directories = {}, .stripes = Stripes(), .faults = {}};
};

// The same bytes come back over any number of disks, spread in any way; and each file is as large as was planned and
// takes part in every round.
TEST(NvmeStore, SeveralFilesEqualOne) {
  for (uint64_t seed = test::first_seed(), end = seed + uint64_t(test::cases(8)); seed < end; ++seed) {
    SCOPED_TRACE("STRATA_SEED=" + std::to_string(seed));
    test::Random random(seed);
    Several several(1 + random() % 4);
    std::vector<double> shares;
    for (size_t f = 0; f < several.directories.size(); ++f) shares.push_back(1 + double(random() % 9));
    several.options.stripes = Stripes(shares);
    std::vector<std::atomic<int64_t>> requests(shares.size());
    several.options.block = several.options.bytes;  // a request a piece
    several.options.faults.no_ring = random() % 3 == 0;
    several.options.faults.request = [&](size_t file, int64_t) { return ++requests[file], 0; };
    const NvmeStore store(several.options);
    const Buffer all(store.bytes(), uint32_t(seed + 1));
    store.channel().write(0, all.data(), store.bytes(), "all");
    for (size_t f = 0; f < shares.size(); ++f) {
      struct stat status {};
      ASSERT_EQ(fstat(store.file(f), &status), 0);
      EXPECT_EQ(status.st_size, several.options.stripes.bytes_of(f, store.bytes()));
      const int64_t rounds = (store.bytes() - 1) / several.options.stripes.round() + 1;
      EXPECT_GE(requests[f], shares.size() == 1 ? 1 : rounds - 1);
    }
    expect_round_trips(store, uint32_t(seed + 1), 20);
  }
}

// What one disk does wrong is said of that one, and transfers that are over are over on all.
TEST(NvmeStore, FailuresNameTheDisk) {
  for (bool no_ring : {false, true}) {
    Several several(3);
    std::atomic<bool> broken = true;
    several.options.faults.no_ring = no_ring;
    several.options.faults.request = [&](size_t file, int64_t) { return broken && file == 1 ? -EIO : 0; };
    const NvmeStore store(several.options);
    const Buffer buffer(store.bytes(), 3);
    NvmeStore::Channel channel = store.channel();
    const std::string text =
        message([&] { channel.write(0, buffer.data(), store.bytes(), "block.1.weight"); }, ExitCode::failed);
    EXPECT_EQ(
        text.find("the NVMe directory " + several.directories[1].path() + ": cannot write tensor \"block.1.weight\""),
        0u)
        << text;
    broken = false;
    expect_round_trips(store, 4, 5);
  }
}

// One directory that cannot be used: its name is said, and the others are as they were.
TEST(NvmeStore, OneOfSeveralIsRefused) {
  for (int wrong = 0; wrong < 3; ++wrong) {
    Several several(2);
    const Directory held;
    std::unique_ptr<NvmeStore> other;
    std::string& second = several.options.directories[1];
    if (wrong == 0) second += "/missing";
    if (wrong == 1) second = "/proc";
    if (wrong == 2) second = held.path(), other = std::make_unique<NvmeStore>(options(held));
    const std::string text = message([&] { NvmeStore store(several.options); });
    EXPECT_EQ(text.find("the NVMe directory " + second), 0u) << text;
    EXPECT_TRUE(several.directories[0].empty());
    several.options.directories[1] = several.directories[1].path();
    const NvmeStore store(several.options);  // nothing is held any more
  }
}

// A file system of a few pages, gone with the test.
class SmallDisk {
 public:
  SmallDisk() : mounted_(mount("tmpfs", directory_.path().c_str(), "tmpfs", 0, "size=256k") == 0) {}
  ~SmallDisk() {
    if (mounted_) umount(directory_.path().c_str());
  }
  bool mounted() const { return mounted_; }
  const std::string& path() const { return directory_.path(); }

 private:
  Directory directory_;
  bool mounted_;
};

TEST(NvmeStore, OneOfSeveralIsTooSmall) {
  const SmallDisk small;
  if (!small.mounted()) GTEST_SKIP() << "nothing can be mounted here";
  Several several(2);
  several.options.directories[1] = small.path();
  const std::string text = message([&] { NvmeStore store(several.options); });
  EXPECT_EQ(text.find("the NVMe directory " + small.path() + " cannot hold its "), 0u) << text;
  EXPECT_NE(text.find(" MiB of the 6.02 MiB that offloading needs: "), std::string::npos) << text;
  EXPECT_NE(text.find(" KiB are free. Free some space, or name another one."), std::string::npos) << text;
  EXPECT_TRUE(several.directories[0].empty());
  // What fits is spread as it is to be: a tenth there.
  several.options.stripes = Stripes({30, 1});
  expect_round_trips(NvmeStore(several.options), 2, 5);
}

TEST(NvmeStore, FoldersOnOneDiskAreTold) {
  const Several several(2);
  const std::string &a = several.directories[0].path(), &b = several.directories[1].path();
  EXPECT_EQ(disk_of(a), disk_of(b));
  EXPECT_EQ(disk_of(a + "/missing"), std::nullopt);
  EXPECT_EQ(same_disk_note({a}), "");
  EXPECT_EQ(same_disk_note({a, b}), "the NVMe directories " + a + " and " + b +
                                        " are on one disk: together they are no faster than one of them.");
  const SmallDisk other;
  if (!other.mounted()) return;
  EXPECT_NE(disk_of(a), disk_of(other.path()));
  EXPECT_EQ(same_disk_note({a, other.path()}), "");
}

TEST(NvmeStore, KilledRunLeavesNoDataAndNoLock) {
  const Directory directory;
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const NvmeStore store(options(directory));
    NvmeStore::Channel channel = store.channel();
    const Buffer buffer(store.bytes(), 1);
    channel.write(0, buffer.data(), store.bytes(), "all");
    if (write(ready[1], "x", 1) != 1) _exit(1);
    while (true) channel.write(0, buffer.data(), store.bytes(), "all");
  }
  char byte;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_NE(message([&] { NvmeStore second(options(directory)); }).find("(process " + std::to_string(child) + " holds"),
            std::string::npos);
  ASSERT_EQ(kill(child, SIGKILL), 0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  close(ready[0]);
  close(ready[1]);
  int64_t left = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path())) left += int64_t(entry.file_size());
  EXPECT_LT(left, 100);  // a process id in the lock file
  {
    const NvmeStore store(options(directory));
    expect_round_trips(store, 10);
  }
  EXPECT_TRUE(directory.empty());
}

}  // namespace
}  // namespace strata::nvme_store_test
