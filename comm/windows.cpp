// Collectives over shared windows; see windows.h.
//
// Every operation runs in rounds of one chunk a rank. In each round a rank (1) puts what others need of it into its
// window, (2) where there is something to reduce, reduces its own chunk from its memory and the others' windows and
// puts the result into its window, (3) takes results from the others' windows. Two sets of windows alternate, so a rank
// is at most one round ahead. Cost for n ranks and b bytes, in copies of memory a rank makes: all_reduce 3 b (n-1)/n
// (of which 2 are in the cache), reduce_scatter and all_gather about half; b up to a chunk: one round in which
// everybody reads everything. Where ranks may read each other's memory (threads do; processes by process_vm_readv, if
// the system lets them), a larger all_gather is one copy: each says where its part is and stays until all have it.
#include "comm/windows.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <optional>

#include "comm/reduce.h"
#include "strata/error.h"

namespace strata {
namespace {

constexpr uint64_t kDirect = 64 << 10;  // bytes from which ranks read each other's memory
constexpr int kSpinsOfWait = 2000;      // about ten microseconds before a wait sleeps

// A count of rounds that one rank raises and others wait for.
struct alignas(64) Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;

  void set(uint32_t to) {
    value.store(to, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) > 0)
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
};

enum Phase { kWritten, kReduced, kTaken, kPhases };

// One rank's counters, and what it thinks the current operation is.
struct alignas(64) Desk {
  Counter done[kPhases];
  std::atomic<uint64_t> operation[2];  // by slot of the round
};

// Two slots from one rank to another, for send and receive.
struct alignas(64) Pair {
  Counter filled, drained;
};

enum class Kind : uint8_t { all_reduce = 1, reduce_scatter, all_gather, broadcast, all_to_all, barrier };
constexpr const char* kNames[] = {"",          "all_reduce", "reduce_scatter", "all_gather",
                                  "broadcast", "all_to_all", "barrier"};

struct BlockLayout {
  int size;
  int64_t chunk, window, desks, pairs, windows, mail, bytes;
  BlockLayout(int n, const WindowsOptions& options) : size(n) {
    chunk = options.chunk_bytes > 0 ? options.chunk_bytes : std::clamp<int64_t>((512 << 10) / n, 16 << 10, 128 << 10);
    chunk = std::max<int64_t>(64, chunk / 64 * 64);  // elements of any type stay aligned
    window = 2 * (n + 1) * chunk;                    // two slots: a chunk to each rank, and the result
    desks = 0;
    pairs = desks + n * int64_t(sizeof(Desk));
    windows = (pairs + int64_t(n) * n * int64_t(sizeof(Pair)) + 4095) / 4096 * 4096;
    mail = windows + n * window;
    bytes = mail + int64_t(n) * n * 2 * chunk;
  }
};

class Windows final : public Communicator {
 public:
  Windows(std::byte* block, std::shared_ptr<void> owner, int rank, WindowsOptions options, const AbortFlag& abort)
      : block_(block),
        owner_(std::move(owner)),
        rank_(rank),
        options_(std::move(options)),
        abort_(abort),
        layout_(int(options_.ranks.size()), options_) {
    inputs_.resize(size_t(size()));
  }

  int rank() const override { return rank_; }
  int size() const override { return layout_.size; }

  void all_reduce(const Pieces& data, DType dtype, Reduction reduction) override {
    if (size() == 1) return;
    begin(Kind::all_reduce, uint64_t(data.bytes()));
    if (data.bytes() <= layout_.chunk) return small_all_reduce(data, dtype, reduction);
    parts_.assign(size_t(size()), {});
    const int64_t unit = size_of(dtype), count = data.bytes() / unit;
    for (int r = 0; r < size(); ++r) {
      const Range share = share_of(count, r, size());
      parts_[size_t(r)] = data.part(share.begin * unit, share.end * unit);
    }
    rounds(&parts_, &parts_[size_t(rank_)], &parts_, dtype, reduction);
    bytes_sent_ += 2 * (data.bytes() - parts_[size_t(rank_)].bytes());
  }

  void reduce_scatter(const std::vector<Pieces>& parts, const Pieces& result, DType dtype,
                      Reduction reduction) override {
    check(parts);
    begin(Kind::reduce_scatter, sum_of(parts));
    if (size() > 1) rounds(&parts, &result, nullptr, dtype, reduction);
    if (size() == 1) copy(parts[0], result);
    for (int r = 0; r < size(); ++r)
      if (r != rank_) bytes_sent_ += parts[size_t(r)].bytes();
  }

  void all_gather(const std::vector<Pieces>& parts) override {
    check(parts);
    begin(Kind::all_gather, sum_of(parts));
    if (size() > 1 && sum_of(parts) >= kDirect && direct())
      read_from_all(parts);
    else if (size() > 1)
      rounds(nullptr, nullptr, &parts, DType::u8, Reduction::sum);
    bytes_sent_ += parts[size_t(rank_)].bytes() * (size() - 1);
  }

  void broadcast(const Pieces& data, int root) override {
    begin(Kind::broadcast, uint64_t(data.bytes()) * 64 + uint64_t(root));
    const int64_t room = layout_.chunk * (size() + 1);
    for (int64_t at = 0; at < data.bytes() && size() > 1; at += room) {
      open_round();
      if (rank_ == root) {
        std::byte* slot = window(rank_);
        data.over(at, at + room,
                  [&](std::byte* from, int64_t n, int64_t to) { std::memcpy(slot + to, from, size_t(n)); });
      }
      finish(kWritten);
      if (rank_ != root) {
        await(root, kWritten);
        const std::byte* slot = window(root);
        data.over(at, at + room,
                  [&](std::byte* to, int64_t n, int64_t from) { std::memcpy(to, slot + from, size_t(n)); });
      }
      close_round();
    }
    if (rank_ == root) bytes_sent_ += data.bytes() * (size() - 1);
  }

  void all_to_all(const std::vector<Pieces>& send, const std::vector<Pieces>& receive) override {
    check(send);
    check(receive);
    begin(Kind::all_to_all, 0);
    copy(send[size_t(rank_)], receive[size_t(rank_)]);
    // Sizes differ by pair, and nobody knows all of them: each round says in its first bytes whether more follows.
    const int64_t room = layout_.chunk - 8;
    for (int64_t at = 0; size() > 1; at += room) {
      open_round();
      bool more = false;
      for (int r = 0; r < size(); ++r) more |= r != rank_ && send[size_t(r)].bytes() > at + room;
      for (int r = 0; r < size(); ++r) {
        if (r == rank_) continue;
        std::byte* slot = window(rank_) + r * layout_.chunk;
        const int64_t left = std::max<int64_t>(0, send[size_t(r)].bytes() - at) * 2 + more;
        std::memcpy(slot, &left, 8);
        send[size_t(r)].over(at, at + room, [&](std::byte* from, int64_t n, int64_t to) {
          std::memcpy(slot + 8 + to, from, size_t(n));
        });
        bytes_sent_ += std::clamp<int64_t>(send[size_t(r)].bytes() - at, 0, room);
      }
      finish(kWritten);
      for (int r = 0; r < size(); ++r) {
        if (r == rank_) continue;
        await(r, kWritten);
        const std::byte* slot = window(r) + rank_ * layout_.chunk;
        int64_t left;
        std::memcpy(&left, slot, 8);
        more |= left & 1;
        if (left / 2 != std::max<int64_t>(0, receive[size_t(r)].bytes() - at))
          fail("rank " + name(r) + " sends " + std::to_string(left / 2) + " bytes where " +
               std::to_string(receive[size_t(r)].bytes() - at) + " are expected");
        receive[size_t(r)].over(at, at + room, [&](std::byte* to, int64_t n, int64_t from) {
          std::memcpy(to, slot + 8 + from, size_t(n));
        });
      }
      close_round();
      if (!more) break;
    }
  }

  void send(const Pieces& data, int to) override {
    operation_ = "send to rank " + name(to);
    Pair& pair = *at<Pair>(layout_.pairs + (int64_t(rank_) * size() + to) * int64_t(sizeof(Pair)));
    for (int64_t i = 0; i < data.bytes(); i += layout_.chunk) {
      const uint32_t filled = pair.filled.value.load(std::memory_order_relaxed);
      wait(pair.drained, filled - 1, to);  // two slots: the one to fill was drained two fillings ago
      std::byte* slot = mail(rank_, to) + (filled % 2) * layout_.chunk;
      data.over(i, i + layout_.chunk,
                [&](std::byte* from, int64_t n, int64_t at) { std::memcpy(slot + at, from, size_t(n)); });
      pair.filled.set(filled + 1);
    }
    bytes_sent_ += data.bytes();
  }

  void receive(const Pieces& data, int from) override {
    operation_ = "receive from rank " + name(from);
    Pair& pair = *at<Pair>(layout_.pairs + (int64_t(from) * size() + rank_) * int64_t(sizeof(Pair)));
    for (int64_t i = 0; i < data.bytes(); i += layout_.chunk) {
      const uint32_t drained = pair.drained.value.load(std::memory_order_relaxed);
      wait(pair.filled, drained + 1, from);
      const std::byte* slot = mail(from, rank_) + (drained % 2) * layout_.chunk;
      data.over(i, i + layout_.chunk,
                [&](std::byte* to, int64_t n, int64_t at) { std::memcpy(to, slot + at, size_t(n)); });
      pair.drained.set(drained + 1);
    }
  }

  void barrier() override {
    begin(Kind::barrier, 0);
    if (size() == 1) return;
    open_round();
    finish(kWritten);
    for (int r = 0; r < size(); ++r)
      if (r != rank_) await(r, kWritten);
    close_round();
  }

 private:
  template <class T>
  T* at(int64_t offset) const {
    return reinterpret_cast<T*>(block_ + offset);
  }
  Desk& desk(int r) const { return *at<Desk>(layout_.desks + r * int64_t(sizeof(Desk))); }
  // Rank r's window of this round.
  std::byte* window(int r) const {
    return block_ + layout_.windows + r * layout_.window + (round_ % 2) * (layout_.window / 2);
  }
  std::byte* mail(int from, int to) const {
    return block_ + layout_.mail + (int64_t(from) * size() + to) * 2 * layout_.chunk;
  }
  std::string name(int r) const { return std::to_string(options_.ranks[size_t(r)]); }

  [[noreturn]] void fail(const std::string& what) const { throw Error(where() + what + ".", ExitCode::failed); }
  std::string where() const {
    return operation_ + " over \"" + options_.name + "\" (operation " + std::to_string(count_) + "): ";
  }

  void check(const std::vector<Pieces>& parts) const { STRATA_CHECK(int(parts.size()) == size()); }
  static uint64_t sum_of(const std::vector<Pieces>& parts) {
    uint64_t sum = 0;
    for (const Pieces& part : parts) sum += uint64_t(part.bytes());
    return sum;
  }
  static void copy(const Pieces& from, const Pieces& to) {
    from.over(0, from.bytes(), [&](std::byte* source, int64_t n, int64_t offset) {
      to.over(offset, offset + n, [&](std::byte* target, int64_t m, int64_t into) {
        if (target != source + into) std::memmove(target, source + into, size_t(m));
      });
    });
  }

  void begin(Kind kind, uint64_t detail) {
    ++count_;
    operation_ = kNames[int(kind)];
    signature_ = (detail << 8 | uint64_t(kind)) ^ uint64_t(count_) << 48;
  }

  // Waits until the slots of this round are free: everybody is done with the round before the last.
  void open_round() {
    for (int r = 0; r < size(); ++r)
      if (r != rank_) wait(desk(r).done[kTaken], round_ - 1, r);
    desk(rank_).operation[round_ % 2].store(signature_, std::memory_order_relaxed);
  }
  void close_round() {
    finish(kTaken);
    ++round_;
  }
  void finish(Phase phase) { desk(rank_).done[phase].set(round_ + 1); }
  void await(int r, Phase phase) {
    wait(desk(r).done[phase], round_ + 1, r);
    if (phase != kWritten) return;
    const uint64_t theirs = desk(r).operation[round_ % 2].load(std::memory_order_relaxed);
    if (theirs != signature_)  // ranks disagree about what comes
      fail("rank " + name(r) + " is in another operation (" + kNames[theirs & 0xff] + " of other size or number)");
  }

  void wait(Counter& counter, uint32_t target, int r) {
    const auto there = [&] { return int32_t(counter.value.load(std::memory_order_acquire) - target) >= 0; };
    for (int i = 0; i < kSpinsOfWait; ++i) {
      if (there()) return;
      __builtin_ia32_pause();
    }
    const auto began = std::chrono::steady_clock::now();
    while (!there()) {
      counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t value = counter.value.load(std::memory_order_seq_cst);
      if (int32_t(value - target) < 0) {
        const timespec slice{0, 50'000'000};
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&counter.value), FUTEX_WAIT, value, &slice, nullptr, 0);
      }
      counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
      if (there()) return;
      if (abort_.raised.load(std::memory_order_acquire)) throw ended_by(abort_.text, where());
      if (std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() > options_.timeout_seconds)
        fail("rank " + name(r) + " did not come within " + std::to_string(int(options_.timeout_seconds)) + " s");
    }
  }

  // The three steps, over as many rounds as the largest part takes. `send` and `result` belong to a reduction, `gather`
  // says where the parts of all ranks go.
  void rounds(const std::vector<Pieces>* send, const Pieces* result, const std::vector<Pieces>* gather, DType dtype,
              Reduction reduction) {
    const int64_t chunk = layout_.chunk;
    int64_t longest = 0;
    for (const Pieces& part : send ? *send : *gather) longest = std::max(longest, part.bytes());
    const Pieces& own = send ? (*send)[size_t(rank_)] : (*gather)[size_t(rank_)];
    for (int64_t at = 0; at < longest; at += chunk) {
      open_round();
      std::byte* mine = window(rank_);
      if (send)
        for (int r = 0; r < size(); ++r)
          if (r != rank_) fill(mine + r * layout_.chunk, (*send)[size_t(r)], at, chunk);
      std::byte* outcome = mine + size() * layout_.chunk;
      if (!send) fill(outcome, own, at, chunk);
      finish(kWritten);
      if (send) {
        for (int r = 0; r < size(); ++r)
          if (r != rank_) await(r, kWritten);
        reduce_own(own, *result, at, chunk, gather ? outcome : nullptr, dtype, reduction);
        if (gather) finish(kReduced);
      }
      if (gather)
        for (int step = 1; step < size(); ++step) {
          const int r = (rank_ + step) % size();
          await(r, send ? kReduced : kWritten);
          const std::byte* from = window(r) + size() * layout_.chunk;
          (*gather)[size_t(r)].over(at, at + chunk, [&](std::byte* to, int64_t n, int64_t offset) {
            std::memcpy(to, from + offset, size_t(n));
          });
        }
      close_round();
    }
  }

  static void fill(std::byte* to, const Pieces& from, int64_t at, int64_t bytes) {
    from.over(at, at + bytes,
              [&](std::byte* data, int64_t n, int64_t offset) { std::memcpy(to + offset, data, size_t(n)); });
  }

  // This rank's chunk: its own memory and the others' windows, into its memory and, when `copy` is given, there.
  void reduce_own(const Pieces& own, const Pieces& result, int64_t at, int64_t chunk, std::byte* copy, DType dtype,
                  Reduction reduction) {
    own.over(at, at + chunk, [&](std::byte* data, int64_t n, int64_t offset) {
      result.over(at + offset, at + offset + n, [&](std::byte* out, int64_t m, int64_t into) {
        for (int r = 0; r < size(); ++r)
          inputs_[size_t(r)] = r == rank_ ? data + into : window(r) + rank_ * layout_.chunk + offset + into;
        reduce_tree(inputs_, out, m, dtype, reduction, options_.rounds_each);
        if (copy) std::memcpy(copy + offset + into, out, size_t(m));
      });
    });
  }

  // Where pieces of a rank's memory are, for others that read them there.
  struct Address {
    int64_t begin, bytes;
  };
  struct Published {
    int64_t process, more, count;
    Address pieces[];
  };

  // Whether every rank may read every other's memory; found out once, by trying.
  bool direct() {
    if (direct_) return *direct_;
    int64_t probe = 1, allowed = 1;
    publish({{reinterpret_cast<std::byte*>(&probe), 8}}, 0);
    for (int r = 0; r < size(); ++r) {
      if (r == rank_) continue;
      await(r, kWritten);
      int64_t word = 0;
      if (!read_from(r, {{reinterpret_cast<std::byte*>(&word), 8}}, 0) || word != 1) allowed = 0;
    }
    leave_when_read();
    open_round();
    std::memcpy(window(rank_), &allowed, 8);
    finish(kWritten);
    for (int r = 0; r < size(); ++r) {
      if (r == rank_) continue;
      await(r, kWritten);
      int64_t theirs;
      std::memcpy(&theirs, window(r), 8);
      allowed &= theirs;
    }
    close_round();
    direct_ = allowed == 1;
    return *direct_;
  }

  // Reads every other rank's part where it is: one copy. Lists of pieces that are longer than a window take more
  // rounds.
  void read_from_all(const std::vector<Pieces>& parts) {
    std::vector<int64_t> got(size_t(size()), 0);
    int64_t sent = 0;
    for (bool more = true; more;) {
      sent = publish(parts[size_t(rank_)], sent);
      more = sent < parts[size_t(rank_)].bytes();
      for (int step = 1; step < size(); ++step) {
        const int r = (rank_ + step) % size();
        await(r, kWritten);
        const Published& theirs = *reinterpret_cast<const Published*>(window(r));
        more |= theirs.more != 0;
        if (!read_from(r, parts[size_t(r)], got[size_t(r)]))
          fail(errno == ESRCH ? "rank " + name(r) + " is gone: its process has ended"
                              : "cannot read rank " + name(r) + "'s memory: " + std::strerror(errno));
        for (int64_t i = 0; i < theirs.count; ++i) got[size_t(r)] += theirs.pieces[i].bytes;
      }
      leave_when_read();
    }
  }

  // Says where this rank's bytes from `from` on are; returns up to where.
  int64_t publish(const Pieces& data, int64_t from) {
    open_round();
    auto& mine = *reinterpret_cast<Published*>(window(rank_));
    const int64_t room = (layout_.window / 2 - int64_t(sizeof(Published))) / int64_t(sizeof(Address));
    mine.process = getpid();
    mine.count = 0;
    int64_t upto = from;
    data.over(from, data.bytes(), [&](std::byte* at, int64_t bytes, int64_t) {
      if (mine.count == room) return;
      mine.pieces[mine.count++] = {reinterpret_cast<int64_t>(at), bytes};
      upto += bytes;
    });
    mine.more = upto < data.bytes();
    finish(kWritten);
    return upto;
  }

  // The pieces that rank r publishes in this round, into `to` from an offset on.
  bool read_from(int r, const Pieces& to, int64_t offset) {
    const Published& theirs = *reinterpret_cast<const Published*>(window(r));
    constexpr size_t kMost = 1024;           // pieces a call
    constexpr int64_t kMostBytes = 1 << 20;  // bytes a call: less than 2 GiB, and more gain nothing
    std::vector<iovec> here, there;
    int64_t bytes = 0;
    bool good = true;
    const auto flush = [&] {
      good = good &&
             process_vm_readv(pid_t(theirs.process), here.data(), here.size(), there.data(), there.size(), 0) == bytes;
      here.clear();
      there.clear();
      bytes = 0;
    };
    for (int64_t i = 0; i < theirs.count; ++i) {
      auto* from = reinterpret_cast<std::byte*>(theirs.pieces[i].begin);
      to.over(offset, offset + theirs.pieces[i].bytes, [&](std::byte* into, int64_t n, int64_t skipped) {
        if (theirs.process == getpid()) {
          std::memcpy(into, from + skipped, size_t(n));
          return;
        }
        for (int64_t at = 0; at < n;) {
          const int64_t m = std::min(n - at, kMostBytes - bytes);
          here.push_back({into + at, size_t(m)});
          there.push_back({from + skipped + at, size_t(m)});
          at += m;
          bytes += m;
          if (here.size() == kMost || bytes == kMostBytes) flush();
        }
      });
      offset += theirs.pieces[i].bytes;
    }
    if (bytes > 0) flush();
    return good;
  }

  // The memory that others read may change again when they are done.
  void leave_when_read() {
    finish(kTaken);
    for (int r = 0; r < size(); ++r)
      if (r != rank_) wait(desk(r).done[kTaken], round_ + 1, r);
    ++round_;
  }

  void small_all_reduce(const Pieces& data, DType dtype, Reduction reduction) {
    open_round();
    fill(window(rank_), data, 0, layout_.chunk);
    finish(kWritten);
    for (int r = 0; r < size(); ++r)
      if (r != rank_) await(r, kWritten);
    data.over(0, layout_.chunk, [&](std::byte* out, int64_t n, int64_t offset) {
      for (int r = 0; r < size(); ++r) inputs_[size_t(r)] = window(r) + offset;
      reduce_tree(inputs_, out, n, dtype, reduction, options_.rounds_each);
    });
    close_round();
    bytes_sent_ += data.bytes() * (size() - 1);
  }

  std::byte* block_;
  std::shared_ptr<void> owner_;
  int rank_;
  WindowsOptions options_;
  const AbortFlag& abort_;
  BlockLayout layout_;
  uint32_t round_ = 0;
  int64_t count_ = 0;
  uint64_t signature_ = 0;
  std::string operation_;
  std::vector<Pieces> parts_;
  std::optional<bool> direct_;
  std::vector<const std::byte*> inputs_;
};

}  // namespace

void AbortFlag::raise(std::string_view what) {
  uint32_t expected = 0;
  static std::atomic_flag writing = ATOMIC_FLAG_INIT;
  if (raised.load() || writing.test_and_set()) return;
  const size_t n = std::min(what.size(), sizeof text - 1);
  std::memcpy(text, what.data(), n);
  text[n] = 0;
  raised.compare_exchange_strong(expected, 1, std::memory_order_release);
  writing.clear();
}

namespace {
constexpr char kUsage = '\2';
}
std::string passed_on(std::string_view why, ExitCode code) {
  return (code == ExitCode::usage ? std::string(1, kUsage) : "") + std::string(why);
}
Error ended_by(std::string_view text, const std::string& where) {
  const bool usage = !text.empty() && text[0] == kUsage;
  if (usage) text.remove_prefix(1);
  return Error((usage ? "" : where) + std::string(text) + (text.ends_with('.') ? "" : "."),
               usage ? ExitCode::usage : ExitCode::failed);
}

int64_t windows_bytes(int size, const WindowsOptions& options) { return BlockLayout(size, options).bytes; }

std::unique_ptr<Communicator> windows_communicator(std::byte* block, std::shared_ptr<void> owner, int rank,
                                                   WindowsOptions options, const AbortFlag& abort) {
  return std::make_unique<Windows>(block, std::move(owner), rank, std::move(options), abort);
}

}  // namespace strata
