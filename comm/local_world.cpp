// Ranks as threads of one process; see world.h.
#include <fmt/format.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "comm/windows.h"
#include "comm/world.h"
#include "memory/arena.h"
#include "strata/error.h"
#include "strata/threads.h"

namespace strata {
namespace {

// What the threads share.
struct Hall {
  explicit Hall(int size, double timeout) : size(size), timeout(timeout) {}
  const int size;
  const double timeout;
  AbortFlag abort;
  std::mutex mutex;
  std::condition_variable changed;
  struct Round {
    std::vector<std::string> texts;
    std::set<int> came;
    int left = 0;
  };
  std::map<int64_t, Round> rounds;
  std::map<std::string, std::weak_ptr<Arena>> blocks;
  std::map<std::string, std::pair<int, int>> files;  // a file, and how many have it
  ~Hall() {
    for (const auto& [key, file] : files) close(file.first);
  }
  std::set<int> waiting;  // for too long
};

class LocalWorld final : public World {
 public:
  LocalWorld(Hall& hall, int rank) : hall_(hall), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return hall_.size; }
  int local_size() const override { return hall_.size; }
  int local_rank() const override { return rank_; }
  bool is_one_process() const override { return true; }

  std::vector<std::string> gather(const std::string& mine) override {
    std::unique_lock lock(hall_.mutex);
    const int64_t number = gathers_++;
    Hall::Round& round = hall_.rounds[number];
    round.texts.resize(size_t(hall_.size));
    round.texts[size_t(rank_)] = mine;
    round.came.insert(rank_);
    if (int(round.came.size()) == hall_.size) hall_.changed.notify_all();
    hall_.changed.wait_for(lock, std::chrono::duration<double>(std::min(hall_.timeout, kLongest)),
                           [&] { return int(round.came.size()) == hall_.size || hall_.abort.raised; });
    if (hall_.abort.raised) throw ended_by(hall_.abort.text);
    if (int(round.came.size()) < hall_.size) throw Error(late(round), ExitCode::failed);
    std::vector<std::string> all = round.texts;
    if (++round.left == hall_.size) hall_.rounds.erase(number);
    return all;
  }

  std::vector<std::string> gather_to_zero(const std::string& mine) override {
    std::vector<std::string> all = gather(mine);
    if (rank_ != 0) all.clear();
    return all;
  }
  std::string broadcast(const std::string& text) override { return gather(rank_ == 0 ? text : "")[0]; }

  std::unique_ptr<Communicator> group(const std::string& name, const std::vector<int>& members,
                                      bool rounds_each) override {
    WindowsOptions options{
        .name = name, .ranks = members, .timeout_seconds = hall_.timeout, .rounds_each = rounds_each};
    const std::string key = key_of(name, members);
    const auto mine = int(std::find(members.begin(), members.end(), rank_) - members.begin());
    STRATA_CHECK(size_t(mine) < members.size());
    std::lock_guard lock(hall_.mutex);
    std::shared_ptr<Arena> block = hall_.blocks[key].lock();
    if (!block) {
      block = std::make_shared<Arena>(windows_bytes(int(members.size()), options));
      hall_.blocks[key] = block;
    }
    return windows_communicator(block->base(), block, mine, std::move(options), hall_.abort);
  }

  int shared_file(const std::string& name, const std::vector<int>& members, int64_t bytes) override {
    const std::string key = key_of(name, members);
    const std::lock_guard lock(hall_.mutex);
    auto& [file, taken] = hall_.files[key];
    if (taken == 0) file = memory_file(bytes);
    const int own = ++taken == int(members.size()) ? file : fcntl(file, F_DUPFD_CLOEXEC, 0);
    if (taken == int(members.size())) hall_.files.erase(key);
    if (own < 0) throw Error(std::string("cannot share memory: ") + std::strerror(errno) + ".", ExitCode::failed);
    return own;
  }

  void check() const override {
    if (hall_.abort.raised) throw ended_by(hall_.abort.text);
  }

  std::vector<int> missing(double seconds) override {
    std::unique_lock lock(hall_.mutex);
    hall_.waiting.insert(rank_);
    hall_.changed.notify_all();
    hall_.changed.wait_for(lock, std::chrono::duration<double>(seconds),
                           [&] { return int(hall_.waiting.size()) == hall_.size; });
    std::vector<int> result;
    for (int r = 0; r < hall_.size; ++r)
      if (!hall_.waiting.contains(r)) result.push_back(r);
    return result;
  }

  void abort(const std::string& why, ExitCode code) override {
    hall_.abort.raise(passed_on(why, code));
    std::lock_guard lock(hall_.mutex);
    hall_.changed.notify_all();
  }

 private:
  static constexpr double kLongest = 1e6;  // seconds; what clocks can count

  // The same for all members, and another one each time.
  std::string key_of(const std::string& name, const std::vector<int>& members) {
    std::string key = name + "#" + std::to_string(made_[name]++);
    for (int member : members) key += " " + std::to_string(member);
    return key;
  }

  std::string late(const Hall::Round& round) const {
    std::string names;
    for (int r = 0; r < hall_.size; ++r)
      if (!round.came.contains(r)) names += (names.empty() ? "" : ", ") + std::to_string(r);
    return (hall_.size - int(round.came.size()) == 1 ? "rank " : "ranks ") + names + " did not come within " +
           fmt::format("{:g}", hall_.timeout) + " s, where texts of all ranks are exchanged.";
  }

  Hall& hall_;
  int rank_;
  int64_t gathers_ = 0;
  std::map<std::string, int> made_;
};

}  // namespace

std::unique_ptr<World> single_world() {
  struct Alone final : World {
    int rank() const override { return 0; }
    int size() const override { return 1; }
    int local_size() const override { return 1; }
    int local_rank() const override { return 0; }
    void check() const override {}
    std::vector<int> missing(double) override { return {}; }
    std::vector<std::string> gather(const std::string& mine) override { return {mine}; }
    std::vector<std::string> gather_to_zero(const std::string& mine) override { return {mine}; }
    std::string broadcast(const std::string& text) override { return text; }
    std::unique_ptr<Communicator> group(const std::string&, const std::vector<int>&, bool) override {
      internal_error("a group of one rank", __FILE__, __LINE__);
    }
    int shared_file(const std::string&, const std::vector<int>&, int64_t bytes) override { return memory_file(bytes); }
    void abort(const std::string&, ExitCode) override {}
  };
  return std::make_unique<Alone>();
}

void run_local(int size, const std::function<void(World&)>& body, double timeout_seconds) {
  Hall hall(size, timeout_seconds);
  std::exception_ptr first;
  std::mutex mutex;
  std::vector<std::thread> threads;
  const auto one = [&](int rank) {
    LocalWorld world(hall, rank);
    try {
      body(world);
    } catch (const std::exception& error) {
      {
        std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
      const auto* known = dynamic_cast<const Error*>(&error);
      world.abort("rank " + std::to_string(rank) + " failed: " + error.what(),
                  known ? known->code() : ExitCode::failed);
    }
  };
  try {
    for (int rank = 1; rank < size; ++rank)
      threads.push_back(start_thread("rank " + std::to_string(rank), [&one, rank] { one(rank); }));
    one(0);
  } catch (const Error&) {  // one() throws nothing: there are no more threads
    LocalWorld(hall, 0).abort("another rank could not start", ExitCode::failed);
    std::lock_guard lock(mutex);
    first = std::current_exception();
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace strata
