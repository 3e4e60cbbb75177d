// Groups of processes; see process_world.h. Shared memory has no name: a memfd that the others open through /proc of
// the process that made it, so nothing is left behind however a run ends.
#include "comm/process_world.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <thread>

#include "comm/fabric.h"
#include "comm/windows.h"
#include "memory/arena.h"
#include "strata/error.h"

namespace strata {
namespace {

// A place where processes can open each other's memory: one boot, one process namespace, one network namespace.
std::string host_identity() {
  std::string identity;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> identity;
  for (const char* space : {"pid", "net", "user"}) {
    char link[64] = {};
    (void)!readlink((std::string("/proc/self/ns/") + space).c_str(), link, sizeof link - 1);
    identity += " " + std::string(link);
  }
  return identity + " " + std::to_string(getuid());
}

// Pages shared by file descriptor; unmapped and closed at the end.
class SharedBlock {
 public:
  SharedBlock(int file, int64_t bytes) : file_(file), bytes_(bytes) {
    void* const place = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (place == MAP_FAILED) {
      const std::string why = std::strerror(errno);
      close(file);
      throw Error("cannot map " + std::to_string(bytes) + " bytes of shared memory: " + why + ".", ExitCode::failed);
    }
    base_ = static_cast<std::byte*>(place);
  }
  ~SharedBlock() {
    munmap(base_, size_t(bytes_));
    close(file_);
  }
  std::byte* base() const { return base_; }

 private:
  std::byte* base_;
  int file_;
  int64_t bytes_;
};

class ProcessWorld final : public World {
 public:
  ProcessWorld(RendezvousOptions rendezvous, NetworkOptions network, int local_size)
      : rank_(rendezvous.rank),
        size_(rendezvous.size),
        network_(std::move(network)),
        meeting_(rendezvous, [this](const std::string& why) { abort_.raise(why); }) {
    everybody_.resize(size_t(size_));
    std::iota(everybody_.begin(), everybody_.end(), 0);
    hosts_ = gather(host_identity());
    local_rank_ = int(std::count(hosts_.begin(), hosts_.begin() + rank_, hosts_[size_t(rank_)]));
    local_size_ = local_size > 0 ? local_size : int(std::count(hosts_.begin(), hosts_.end(), hosts_[size_t(rank_)]));
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int local_size() const override { return local_size_; }
  int local_rank() const override { return local_rank_; }

  std::vector<std::string> gather(const std::string& mine) override {
    return meeting_.collect(next_key(), everybody_, mine, Answer::all, network_.timeout_seconds);
  }
  std::vector<std::string> gather_to_zero(const std::string& mine) override {
    return meeting_.collect(next_key(), everybody_, mine, rank_ == 0 ? Answer::all : Answer::none, work_seconds());
  }
  std::string broadcast(const std::string& text) override {
    const bool own = rank_ == 0;
    const auto texts =
        meeting_.collect(next_key(), everybody_, own ? text : "", own ? Answer::none : Answer::first, work_seconds());
    return own ? text : texts[0];
  }

  int shared_file(const std::string& name, const std::vector<int>& members, int64_t bytes) override {
    for (int member : members)
      if (hosts_[size_t(member)] != hosts_[size_t(rank_)])
        throw Error("ranks " + std::to_string(rank_) + " and " + std::to_string(member) +
                    " are to have one memory of " + name +
                    ", but they are on different hosts; start all that share it on one.");
    const std::string key = key_of("file " + name, members);
    if (members[0] != rank_) {
      const int file = file_of_first(key, members);
      meeting_.collect(key + " opened", members, "", Answer::all, network_.timeout_seconds);
      return file;
    }
    const int file = memory_file(bytes);
    publish(key, members, file);
    meeting_.collect(key + " opened", members, "", Answer::all, network_.timeout_seconds);
    return file;
  }

  std::unique_ptr<Communicator> group(const std::string& name, const std::vector<int>& members,
                                      bool rounds_each) override {
    const std::string key = key_of("group " + name, members);
    const auto mine = int(std::find(members.begin(), members.end(), rank_) - members.begin());
    STRATA_CHECK(size_t(mine) < members.size());
    const bool one_host = std::all_of(members.begin(), members.end(),
                                      [this](int member) { return hosts_[size_t(member)] == hosts_[size_t(rank_)]; });
    if (network_.provider != "auto" || !one_host)
      return fabric_communicator({.name = name,
                                  .ranks = members,
                                  .timeout_seconds = network_.timeout_seconds,
                                  .provider = network_.provider == "auto" ? "tcp" : network_.provider,
                                  .address = network_.address,
                                  .direct = network_.direct,
                                  .rounds_each = rounds_each},
                                 mine, meeting_, key, abort_);
    WindowsOptions options{
        .name = name, .ranks = members, .timeout_seconds = network_.timeout_seconds, .rounds_each = rounds_each};
    const int64_t bytes = windows_bytes(int(members.size()), options);
    auto block = mine == 0 ? make(key, members, bytes) : open(key, members, bytes);
    std::byte* const base = block->base();
    return windows_communicator(base, std::move(block), mine, std::move(options), abort_);
  }

  void check() const override {
    if (abort_.raised) throw ended_by(abort_.text);
  }

  std::vector<int> missing(double seconds) override { return meeting_.missing(seconds); }

  void abort(const std::string& why, ExitCode code) override {
    abort_.raise(passed_on(why, code));
    meeting_.fail(passed_on(why, code));
  }

 private:
  // What comes before these texts is work of one rank alone, which operations of all are not kept waiting by.
  double work_seconds() const { return std::max(network_.timeout_seconds, network_.work_seconds); }
  // The same for all members, and another one each time.
  std::string key_of(const std::string& name, const std::vector<int>& members) {
    std::string key = name + " " + std::to_string(made_[name]++);
    for (int member : members) key += " " + std::to_string(member);
    return key;
  }
  std::string next_key() { return "number " + std::to_string(gathers_++) + " of all ranks"; }

  std::shared_ptr<SharedBlock> make(const std::string& key, const std::vector<int>& members, int64_t bytes) {
    const int file = memory_file(bytes);
    auto block = std::make_shared<SharedBlock>(file, bytes);
    publish(key, members, file);
    return block;
  }
  std::shared_ptr<SharedBlock> open(const std::string& key, const std::vector<int>& members, int64_t bytes) {
    return std::make_shared<SharedBlock>(file_of_first(key, members), bytes);
  }

  // The first of the members has a file, which the others open where its process has it.
  void publish(const std::string& key, const std::vector<int>& members, int file) {
    meeting_.collect(key, members, "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file), Answer::none,
                     0);
  }
  int file_of_first(const std::string& key, const std::vector<int>& members) {
    const std::string path = meeting_.collect(key, members, "", Answer::first, network_.timeout_seconds)[0];
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    const std::string why = std::strerror(errno);
    // A rank that has just ended is why; what the rendezvous says of it may come a moment later.
    for (int i = 0; file < 0 && i < 100 && !abort_.raised; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (file < 0) check();
    if (file < 0)
      throw Error("cannot open the shared memory of another rank (" + path + "): " + why +
                      ". Set network.provider = \"tcp\" where processes may not see each other.",
                  ExitCode::failed);
    return file;
  }

  int rank_, size_, local_size_ = 1, local_rank_ = 0;
  NetworkOptions network_;
  AbortFlag abort_;
  Rendezvous meeting_;
  std::vector<int> everybody_;
  std::vector<std::string> hosts_;
  int64_t gathers_ = 0;
  std::map<std::string, int> made_;
};

}  // namespace

std::unique_ptr<World> process_world(RendezvousOptions rendezvous, NetworkOptions network, int local_size) {
  limit_fabric_buffers();
  return std::make_unique<ProcessWorld>(std::move(rendezvous), std::move(network), local_size);
}

}  // namespace strata
