// Ranks as processes: every way bytes can take gives the same bits; ranks that die, hang or do not come are named.
#include "comm/process_world.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "memory/arena.h"
#include "strata/error.h"

namespace strata::process_world_test {
namespace {

struct Child {
  int code = -1;  // exit status, or -signal
  std::string text;
};

// A socket of this host at `port` (0: any that is free), or -1 when it is taken.
int bound_socket(int port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(uint16_t(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return socket;
  close(socket);
  return -1;
}

// Below the ports that the kernel gives to outgoing connections, which another test may be making just now.
int free_port() {
  static int next = 10000 + int(getpid()) % 300 * 64;  // processes that run beside each other take others
  for (;; ++next)
    if (const int socket = bound_socket(next); socket >= 0) {
      close(socket);
      return next++;
    }
}

// One process a rank; what `body` throws is its text and its code.
std::vector<Child> run_processes(int size, NetworkOptions network, const std::function<void(World&)>& body,
                                 const std::function<void(RendezvousOptions&)>& change = {},
                                 const std::function<void(const std::vector<pid_t>&)>& meanwhile = {}) {
  std::string folder = (std::filesystem::temp_directory_path() / "strata-ranks-XXXXXX").string();
  STRATA_CHECK(mkdtemp(folder.data()));
  const int port = free_port();
  const bool failed_before = testing::Test::HasFailure();
  std::vector<pid_t> pids;
  for (int rank = 0; rank < size; ++rank) {
    std::fflush(nullptr);
    const pid_t pid = fork();
    if (pid == 0) {
      int code = 0;
      std::string text;
      try {
        RendezvousOptions options{.rank = rank,
                                  .size = size,
                                  .port = port,
                                  .token = "t",
                                  .version = "1",
                                  .join_seconds = 20,
                                  .silence_seconds = 2};
        if (change) change(options);
        const auto world = process_world(options, network, 0);
        try {
          body(*world);
        } catch (const Error& error) {
          world->abort(error.what());
          throw;
        }
      } catch (const Error& error) {
        code = int(error.code());
        text = error.what();
      }
      std::ofstream(folder + "/" + std::to_string(rank)) << text;
      _exit(!failed_before && testing::Test::HasFailure() ? 77 : code);
    }
    pids.push_back(pid);
  }
  if (meanwhile) meanwhile(pids);
  std::vector<Child> children;
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    waitpid(pids[size_t(rank)], &status, 0);
    Child child{.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), .text = ""};
    std::ifstream file(folder + "/" + std::to_string(rank));
    child.text.assign(std::istreambuf_iterator<char>(file), {});
    children.push_back(child);
  }
  std::filesystem::remove_all(folder);
  return children;
}

std::vector<int> everybody(int size) {
  std::vector<int> list;
  for (int r = 0; r < size; ++r) list.push_back(r);
  return list;
}

float value(int rank, size_t i) { return float(std::sin(double(rank) * 7919 + double(i) * 13 + 1)); }
float tree(const std::vector<float>& leaves, int begin, int end) {
  if (end - begin == 1) return leaves[size_t(begin)];
  int split = 1;
  while (split * 2 < end - begin) split *= 2;
  return tree(leaves, begin, begin + split) + tree(leaves, begin + split, end);
}

class Processes : public testing::TestWithParam<std::tuple<int, std::string>> {};

TEST_P(Processes, Collectives) {
  const auto [size, provider] = GetParam();
  // "steps": as large groups do, by recursive doubling, halving and rings
  const NetworkOptions network{.provider = provider == "steps" ? "tcp" : provider,
                               .address = "",
                               .direct = provider == "steps" ? 1 : 31,
                               .timeout_seconds = 20};
  const auto children = run_processes(size, network, [size = size, provider = provider](World& world) {
    const auto group = world.group("data", everybody(size));
    const auto pieces = [](std::vector<float>& v, Range r) {  // in two pieces
      const int64_t middle = (r.begin + r.end) / 2;
      Pieces p;
      p.add({reinterpret_cast<std::byte*>(v.data() + r.begin), (middle - r.begin) * 4});
      p.add({reinterpret_cast<std::byte*>(v.data() + middle), (r.end - middle) * 4});
      return p;
    };
    for (size_t count : {size_t(1), size_t(1000), size_t(700001)}) {
      std::vector<float> data(count), expected(count);
      const auto fill = [&] {
        for (size_t i = 0; i < count; ++i) data[i] = value(world.rank(), i);
      };
      for (size_t i = 0; i < count; ++i) {
        std::vector<float> leaves;
        for (int r = 0; r < size; ++r) leaves.push_back(value(r, i));
        expected[i] = tree(leaves, 0, size);
      }
      fill();
      group->all_reduce(pieces(data, {0, int64_t(count)}), DType::f32);
      EXPECT_EQ(data, expected);
      std::vector<Pieces> parts;
      std::vector<Range> shares;
      for (int r = 0; r < size; ++r) {
        shares.push_back(share_of(int64_t(count), r, size));
        parts.push_back(pieces(data, shares.back()));
      }
      fill();
      const Range mine = shares[size_t(world.rank())];
      std::vector<float> result(size_t(mine.count()));
      group->reduce_scatter(parts, pieces(result, {0, mine.count()}), DType::f32);
      std::copy(result.begin(), result.end(), data.begin() + mine.begin);
      group->all_gather(parts);
      EXPECT_EQ(data, expected);
      // As many pieces as there are elements.
      std::vector<Pieces> crumbs(size_t(size), Pieces{});
      for (int r = 0; r < size; ++r)
        for (int64_t i = shares[size_t(r)].begin; i < shares[size_t(r)].end; ++i)
          crumbs[size_t(r)].add({reinterpret_cast<std::byte*>(data.data() + i), 4});
      std::fill(data.begin(), data.end(), -1.f);
      std::copy(result.begin(), result.end(), data.begin() + mine.begin);
      if (count < 100000 || provider == "auto") {
        group->all_gather(crumbs);
        EXPECT_EQ(data, expected);
      }
      const int root = size - 1;
      if (world.rank() == root) fill();
      group->broadcast(pieces(data, {0, int64_t(count)}), root);
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(data[i], value(root, i));
      std::vector<float> got(count);
      std::vector<Pieces> to, from;
      for (int r = 0; r < size; ++r) to.push_back(parts[size_t(r)]);
      // Rank r gets its share from everybody: sizes of a row differ from those of a column.
      std::vector<std::vector<float>> columns(size_t(size), std::vector<float>(size_t(mine.count())));
      for (int r = 0; r < size; ++r) from.push_back(pieces(columns[size_t(r)], {0, mine.count()}));
      fill();
      group->all_to_all(to, from);
      for (int r = 0; r < size; ++r)
        for (int64_t i = 0; i < mine.count(); ++i)
          ASSERT_EQ(columns[size_t(r)][size_t(i)], value(r, size_t(mine.begin + i)));
      group->barrier();
      if (size == 1) continue;
      if (world.rank() == 0) group->send(pieces(data, {0, int64_t(count)}), 1);
      if (world.rank() == 1) {
        group->receive(pieces(got, {0, int64_t(count)}), 0);
        for (size_t i = 0; i < count; ++i) ASSERT_EQ(got[i], value(0, i));
      }
    }
  });
  for (const Child& child : children) {
    EXPECT_EQ(child.code, 0);
    EXPECT_EQ(child.text, "");
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, Processes,
                         testing::Combine(testing::Values(2, 3, 4), testing::Values("auto", "tcp", "shm", "steps")));

// Shared with the children: how many ranks have done their first exchange.
std::atomic<int>& arrived() {
  static auto* shared =
      new (mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) std::atomic<int>(0);
  return *shared;
}

void all_reduce_for_ever(World& world) {
  const auto group = world.group("data", everybody(world.size()));
  std::vector<float> data(50000);
  for (int i = 0;; ++i) {
    group->all_reduce({{reinterpret_cast<std::byte*>(data.data()), 200000}}, DType::f32);
    if (i == 0) ++arrived();
  }
}

// Killed or stopped, rank 0 included: the others end soon, and say who and where.
// Pairs of ranks: each sees what the other of its pair wrote to the page that they share, and nothing else.
TEST(SharedFiles, AreOfTheirRanksAlone) {
  const auto check = [](World& world) {
    const int rank = world.rank(), other = (rank + 2) % 4;
    const std::vector<int> pair{std::min(rank, other), std::max(rank, other)};
    for (int n = 0; n < 2; ++n) {  // another one each time
      const int file = world.shared_file("numbers", pair, 4096);
      Arena arena(8192);
      arena.share(file, 4096);
      close(file);
      auto* const numbers = reinterpret_cast<int*>(arena.base());
      EXPECT_EQ(numbers[rank], 0);
      world.gather("");
      numbers[rank] = rank + 10;
      numbers[1024 + rank] = rank + 20;
      world.gather("");
      for (int r = 0; r < 4; ++r) {
        EXPECT_EQ(numbers[r], r == rank || r == other ? r + 10 : 0) << r;
        EXPECT_EQ(numbers[1024 + r], r == rank ? r + 20 : 0) << r;
      }
    }
  };
  for (const Child& child : run_processes(4, {}, check)) EXPECT_EQ(child.code, 0) << child.text;
  run_local(4, check);
}

// Another name space of users stands for another host.
TEST(SharedFiles, NeedOneHost) {
  const auto children = run_processes(
      2, {},
      [](World& world) {
        close(world.shared_file("numbers", {0, 1}, 4096));
      },
      [](RendezvousOptions& options) {
        if (options.rank == 1 && unshare(CLONE_NEWUSER) != 0) throw Error("no name space", ExitCode::failed);
        options.join_seconds = 5;
      });
  if (children[1].text == "no name space") GTEST_SKIP() << "name spaces cannot be made here";
  EXPECT_EQ(children[0].code, int(ExitCode::usage));
  EXPECT_NE(children[0].text.find("ranks 0 and 1 are to have one memory of numbers, but they are on different hosts"),
            std::string::npos)
      << children[0].text;
}

TEST(ProcessFaults, AreNamed) {
  for (const std::string provider : {"auto", "tcp"})
    for (int victim : {2, 0})
      for (int signal : {SIGKILL, SIGSTOP}) {
        arrived() = 0;
        // Nobody waits for so long: the loss is seen.
        const auto children = run_processes(3, {.provider = provider, .timeout_seconds = 1000}, all_reduce_for_ever, {},
                                            [&](const std::vector<pid_t>& pids) {
                                              for (int i = 0; i < 3000 && arrived() < 3; ++i) usleep(10'000);
                                              kill(pids[size_t(victim)], signal);
                                              usleep(signal == SIGSTOP ? 3'200'000 : 300'000);
                                              kill(pids[size_t(victim)], SIGKILL);
                                            });
        for (int rank = 0; rank < 3; ++rank) {
          if (rank == victim) continue;
          EXPECT_EQ(children[size_t(rank)].code, 1) << provider << victim << signal;
          EXPECT_NE(children[size_t(rank)].text.find("rank " + std::to_string(victim) + " is gone"), std::string::npos)
              << children[size_t(rank)].text;
          EXPECT_NE(children[size_t(rank)].text.find("all_reduce over \"data\""), std::string::npos)
              << children[size_t(rank)].text;
        }
      }
  EXPECT_EQ(std::system("ls /dev/shm | grep -q strata"), 256);  // nothing left
}

// What comes after an operation has failed is not written to its memory, which may be another's by then.
TEST(ProcessFaults, LateBytesGoNowhere) {
  for (int repeat = 0; repeat < 12; ++repeat) {
    arrived() = 0;
    const auto children = run_processes(
        3, {.provider = "tcp", .timeout_seconds = 20},
        [](World& world) {
          auto group = world.group("data", everybody(3));
          std::vector<std::byte> memory(3 << 23);
          std::vector<Pieces> parts;
          for (int r = 0; r < 3; ++r) parts.push_back({{memory.data() + (r << 23), 1 << 23}});
          try {
            for (int i = 0;; ++i) {
              group->all_gather(parts);
              if (i == 0) ++arrived();
            }
          } catch (const Error&) {
            std::fill(memory.begin(), memory.end(), std::byte(7));
            group.reset();
            EXPECT_EQ(std::count(memory.begin(), memory.end(), std::byte(7)), std::ssize(memory));
            throw;
          }
        },
        {},
        [&](const std::vector<pid_t>& pids) {
          for (int i = 0; i < 3000 && arrived() < 3; ++i) usleep(10'000);
          usleep(10'000);
          kill(pids[1], SIGSTOP);  // what rank 2 sends it waits at its door
          usleep(1000 * repeat);
          kill(pids[2], SIGSTOP);
          kill(pids[0], SIGKILL);
          kill(pids[1], SIGCONT);
          usleep(20'000);
          kill(pids[2], SIGCONT);
        });
    for (int rank : {1, 2}) {
      EXPECT_EQ(children[size_t(rank)].code, 1) << rank;
      EXPECT_NE(children[size_t(rank)].text.find("rank 0 is gone"), std::string::npos) << children[size_t(rank)].text;
    }
  }
}

// One that has never been connected to: libfabric tries again and again, and this is not to last.
TEST(ProcessFaults, AFirstSendToALostRankEnds) {
  const auto children = run_processes(2, {.provider = "tcp", .timeout_seconds = 3}, [](World& world) {
    const auto group = world.group("data", everybody(2));
    if (world.rank() == 1) _exit(9);
    usleep(500'000);
    float one = 1;
    group->send({{reinterpret_cast<std::byte*>(&one), 4}}, 1);
    group->barrier();
  });
  EXPECT_EQ(children[0].code, 1);
  EXPECT_NE(children[0].text.find("rank 1 is gone"), std::string::npos) << children[0].text;
}

TEST(ProcessFaults, WhoDoesNotComeIsNamed) {
  const auto children = run_processes(
      3, {}, [](World&) {},
      [](RendezvousOptions& o) {
        if (o.rank == 1) _exit(9);
        o.join_seconds = 1;
      });
  for (int rank : {0, 2}) {
    EXPECT_EQ(children[size_t(rank)].code, 2);
    EXPECT_NE(children[size_t(rank)].text.find("rank 1 did not come to the rendezvous"), std::string::npos)
        << children[size_t(rank)].text;
  }
}

// A rank that lives and does not come: its connection is well, so that only a limit of time ends the wait.
TEST(ProcessFaults, WhoGivesNoTextIsNamed) {
  for (const int late : {0, 1}) {
    const auto children = run_processes(2, {.timeout_seconds = 1, .work_seconds = 1}, [&](World& world) {
      for (; world.rank() == late; usleep(10'000)) world.check();
      if (late == 1) world.gather_to_zero("here");
      world.broadcast("");
    });
    const Child& waited = children[size_t(1 - late)];
    EXPECT_EQ(waited.code, 1);
    EXPECT_NE(waited.text.find("rank " + std::to_string(late) + " did not come within 1 s"), std::string::npos)
        << waited.text;
  }
}

TEST(ProcessFaults, StrangersAreTurnedAway) {
  const auto text_of = [](const std::function<void(RendezvousOptions&)>& change) {
    const auto children = run_processes(
        2, {}, [](World&) {},
        [&](RendezvousOptions& o) {
          o.join_seconds = 1;
          if (o.rank == 1) change(o);
        });
    EXPECT_EQ(children[1].code, 2);
    EXPECT_EQ(children[0].code, 2);
    return children[1].text;
  };
  EXPECT_NE(text_of([](RendezvousOptions& o) { o.token = "other"; }).find("belongs to another job"), std::string::npos);
  EXPECT_NE(text_of([](RendezvousOptions& o) { o.version = "2"; }).find("one version everywhere"), std::string::npos);
  EXPECT_NE(text_of([](RendezvousOptions& o) { o.size = 3; }).find("was started for 2 ranks, rank 1 for 3"),
            std::string::npos);
  EXPECT_NE(text_of([](RendezvousOptions& o) { o.address = "no.such.host.invalid"; }).find("cannot resolve"),
            std::string::npos);
}

TEST(ProcessFaults, APortThatIsTaken) {
  const int socket = bound_socket(0);
  ASSERT_EQ(listen(socket, 1), 0);
  sockaddr_in address{};
  socklen_t length = sizeof address;
  ASSERT_EQ(getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const int port = ntohs(address.sin_port);
  const auto children = run_processes(
      1, {}, [](World&) {}, [&](RendezvousOptions& o) { o.port = port; });
  EXPECT_EQ(children[0].code, 2);
  EXPECT_NE(children[0].text.find("cannot listen at 127.0.0.1:" + std::to_string(port)), std::string::npos);
  close(socket);
}

// As many as a large job has. What they do at a start takes about a second and a half on two cores; more than 20 would
// be waiting, or work that grows with their square.
TEST(ManyRanks, JoinCompareAndLeave) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  const int size = 48;
#else
  const int size = 512;
#endif
  const auto began = std::chrono::steady_clock::now();
  const auto children = run_processes(
      size, {},
      [&](World& world) {
        const std::string text(4000, 'c');
        EXPECT_EQ(world.broadcast(world.rank() == 0 ? text : ""), text);
        EXPECT_EQ(world.gather_to_zero(text).size(), world.rank() == 0 ? size_t(size) : 0);
        const auto all = world.gather(std::to_string(world.rank()));
        for (int r = 0; r < size; ++r) ASSERT_EQ(all[size_t(r)], std::to_string(r));
      },
      [](RendezvousOptions& o) { o.join_seconds = o.silence_seconds = 120; });
  for (int r = 0; r < size; ++r) EXPECT_EQ(children[size_t(r)].code, 0) << r << ": " << children[size_t(r)].text;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  RecordProperty("seconds", std::to_string(seconds));
  EXPECT_LT(seconds, 20);
}

TEST(ProcessFaults, AProviderThatDoesNotExist) {
  const auto children = run_processes(2, {.provider = "carrier_pigeon"}, all_reduce_for_ever);
  EXPECT_NE((children[0].text + children[1].text).find("libfabric has no provider \"carrier_pigeon\""),
            std::string::npos)
      << children[0].text;
}

}  // namespace
}  // namespace strata::process_world_test
