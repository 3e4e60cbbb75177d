// Collectives over tagged messages; see fabric.h.
//
// Four algorithms for n ranks and b bytes (of all parts together), chosen by size and number of ranks. All reduce in
// the tree that communicator.h promises, so results equal each other's, and those over shared memory, bit for bit.
//
//   direct              n-1 messages at once, b (n-1)/n bytes a rank for reduce_scatter and all_gather, the least there
//   is;
//                       all_reduce is both, or for small b one step in which everybody sends all to everybody
//   recursive doubling  all_reduce, small b, n > `direct` a power of two: log2 n steps of b bytes
//   recursive halving   reduce_scatter there: log2 n steps, b (n-1)/n bytes. Its nearest ranks go first, as the tree
//   does ring                all_gather, large b, n > `direct`: n-1 steps of b/n bytes from neighbour to neighbour, so
//   that no rank
//                       is sent to by all others at once. (Sums in a ring take another order; so there is none.)
//
// Messages are chunks of 1 MiB, double-buffered: one is on the way while the one before is reduced.
#include "comm/fabric.h"

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_tagged.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <set>
#include <thread>

#include "comm/reduce.h"
#include "strata/convert.h"
#include "strata/error.h"
#include "strata/fingerprint.h"

namespace strata {
namespace {

constexpr int64_t kChunk = 1 << 20;   // bytes a message
constexpr int64_t kSmall = 64 << 10;  // all_reduce in one step, or log2 n
constexpr int64_t kLarge = 1 << 20;   // all_gather in a ring
constexpr int kPolls = 2000;

template <class T>
struct Handle {
  T* value = nullptr;
  ~Handle() {
    if (value) fi_close(&value->fid);
  }
  T* operator->() const { return value; }
};

std::string all_providers() {
  fi_info* list = nullptr;
  if (fi_getinfo(FI_VERSION(1, 11), nullptr, nullptr, 0, nullptr, &list) != 0) return "none";
  std::set<std::string> names;
  for (fi_info* one = list; one; one = one->next) names.insert(one->fabric_attr->prov_name);
  fi_freeinfo(list);
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

class Fabric final : public Communicator {
 public:
  Fabric(FabricOptions options, int rank, Rendezvous& meeting, const std::string& key, const AbortFlag& abort)
      : rank_(rank), options_(std::move(options)), abort_(abort) {
    if (options_.address.empty()) options_.address = meeting.local_address();
    open();
    char name[256];
    size_t length = sizeof name;
    must(fi_getname(&endpoint_->fid, name, &length), "fi_getname");
    const auto addresses =
        meeting.collect(key, options_.ranks, std::string(name, length), Answer::all, options_.timeout_seconds);
    for (int r = 0; r < size(); ++r) {
      const std::string& address = addresses[size_t(r)];
      fi_addr_t to = FI_ADDR_UNSPEC;
      if (fi_av_insert(addresses_.value, address.data(), 1, &to, 0, nullptr) != 1)
        throw Error("libfabric does not take the address of rank " + name_of(r) + ".", ExitCode::failed);
      peers_.push_back(to);
    }
    for (auto& slot : staging_) slot.resize(size_t(2 * size()) * size_t(kChunk));
    inputs_.resize(size_t(size()));
  }
  ~Fabric() override {
    if (info_) fi_freeinfo(info_);
    // Of an operation that failed messages are on their way. Closing would still receive them, into memory that may be
    // another's by now, and libfabric crashes when a connection closes while others are at work (seen in 1.17). Only a
    // process that ends has such a group: what is open stays so till then, and moves nothing as nobody calls it.
    if (ended_)
      endpoint_.value = nullptr, completions_.value = nullptr, addresses_.value = nullptr, domain_.value = nullptr,
      fabric_.value = nullptr;
  }

  int rank() const override { return rank_; }
  int size() const override { return int(options_.ranks.size()); }

  void all_reduce(const Pieces& data, DType dtype, Reduction reduction) override {
    begin("all_reduce");
    if (data.bytes() <= kSmall) {
      if (many(dtype)) return double_up(data, dtype, reduction);
      std::vector<Pieces> all(size_t(size()), data);
      return reduce(all, data, dtype, reduction);
    }
    std::vector<Pieces> parts;
    const int64_t unit = size_of(dtype), count = data.bytes() / unit;
    for (int r = 0; r < size(); ++r) {
      const Range share = share_of(count, r, size());
      parts.push_back(data.part(share.begin * unit, share.end * unit));
    }
    reduce(parts, parts[size_t(rank_)], dtype, reduction);
    ++count_;
    gather(parts);
  }
  void reduce_scatter(const std::vector<Pieces>& parts, const Pieces& result, DType dtype,
                      Reduction reduction) override {
    begin("reduce_scatter");
    reduce(parts, result, dtype, reduction);
  }
  void all_gather(const std::vector<Pieces>& parts) override {
    begin("all_gather");
    gather(parts);
  }
  void broadcast(const Pieces& data, int root) override {
    begin("broadcast");
    // In parts from the root, then from everybody to everybody.
    std::vector<Pieces> parts, none(static_cast<size_t>(size()));
    for (int r = 0; r < size(); ++r) {
      const Range share = share_of(data.bytes(), r, size());
      parts.push_back(data.part(share.begin, share.end));
    }
    std::vector<Pieces> receive = none;
    if (rank_ != root) receive[size_t(root)] = parts[size_t(rank_)];
    exchange(rank_ == root ? parts : none, receive);
    ++count_;
    gather(parts);
  }
  void all_to_all(const std::vector<Pieces>& send, const std::vector<Pieces>& receive) override {
    begin("all_to_all");
    const Pieces &from = send[size_t(rank_)], &to = receive[size_t(rank_)];
    std::vector<std::byte> own(static_cast<size_t>(from.bytes()));
    pack(own.data(), from, 0, from.bytes());
    unpack(own.data(), to, 0, to.bytes());
    exchange(send, receive);
  }
  void send(const Pieces& data, int to) override {
    operation_ = "send to rank " + name_of(to);
    std::vector<Pieces> parts(static_cast<size_t>(size()));
    parts[size_t(to)] = data;
    exchange(parts, std::vector<Pieces>(static_cast<size_t>(size())), kPairTag);
  }
  void receive(const Pieces& data, int from) override {
    operation_ = "receive from rank " + name_of(from);
    std::vector<Pieces> parts(static_cast<size_t>(size()));
    parts[size_t(from)] = data;
    exchange(std::vector<Pieces>(static_cast<size_t>(size())), parts, kPairTag);
  }
  void barrier() override {
    int32_t one = 1;
    all_reduce({{reinterpret_cast<std::byte*>(&one), 4}}, DType::i32, Reduction::sum);
    operation_ = "barrier";
  }

 private:
  static constexpr uint64_t kPairTag = uint64_t(1) << 63;
  struct Context {
    fi_context2 for_provider;
    int slot, peer;
    bool receives;
  };

  void must(int64_t code, const char* call) {
    if (code < 0) end(Error(failed(call, int(-code)) + ".", ExitCode::failed));
  }

  void open() {
    fi_info* hints = fi_allocinfo();
    hints->caps = FI_TAGGED | FI_SEND | FI_RECV;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->tx_attr->msg_order = hints->rx_attr->msg_order = FI_ORDER_SAS;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->mr_mode = 0;
    int found = -FI_ENODATA;
    for (const std::string& name : {options_.provider, options_.provider + ";ofi_rxm"}) {
      free(hints->fabric_attr->prov_name);
      hints->fabric_attr->prov_name = strdup(name.c_str());
      const bool by_address = options_.provider != "shm" && !options_.address.empty();
      found = fi_getinfo(FI_VERSION(1, 11), by_address ? options_.address.c_str() : nullptr, nullptr,
                         by_address ? FI_SOURCE : 0, hints, &info_);
      if (found == 0) break;
    }
    fi_freeinfo(hints);
    if (found != 0)
      throw Error("libfabric has no provider \"" + options_.provider + "\" for the address \"" + options_.address +
                  "\" (" + fi_strerror(-found) + "). There are: " + all_providers() + ".");
    must(fi_fabric(info_->fabric_attr, &fabric_.value, nullptr), "fi_fabric");
    must(fi_domain(fabric_.value, info_, &domain_.value, nullptr), "fi_domain");
    fi_av_attr av{};
    av.type = FI_AV_UNSPEC;
    must(fi_av_open(domain_.value, &av, &addresses_.value, nullptr), "fi_av_open");
    fi_cq_attr cq{};
    cq.format = FI_CQ_FORMAT_TAGGED;
    cq.wait_obj = FI_WAIT_UNSPEC;
    cq.size = 4096;
    must(fi_cq_open(domain_.value, &cq, &completions_.value, nullptr), "fi_cq_open");
    must(fi_endpoint(domain_.value, info_, &endpoint_.value, nullptr), "fi_endpoint");
    must(fi_ep_bind(endpoint_.value, &addresses_->fid, 0), "fi_ep_bind");
    must(fi_ep_bind(endpoint_.value, &completions_->fid, FI_SEND | FI_RECV), "fi_ep_bind");
    must(fi_enable(endpoint_.value), "fi_enable");
  }

  std::string name_of(int r) const { return std::to_string(options_.ranks[size_t(r)]); }
  void begin(const char* operation) {
    STRATA_CHECK(!ended_);
    ++count_;
    ++operations_;
    operation_ = operation;
  }
  [[noreturn]] void end(const Error& error) {
    ended_ = true;
    throw error;
  }
  [[noreturn]] void fail(const std::string& what) { end(Error(where() + what + ".", ExitCode::failed)); }
  std::string where() const {
    return operation_ + " over \"" + options_.name + "\" (operation " + std::to_string(operations_) + "): ";
  }

  static void pack(std::byte* to, const Pieces& from, int64_t begin, int64_t end) {
    from.over(begin, end, [&](std::byte* data, int64_t n, int64_t at) { std::memcpy(to + at, data, size_t(n)); });
  }
  static void unpack(const std::byte* from, const Pieces& to, int64_t begin, int64_t end) {
    to.over(begin, end, [&](std::byte* data, int64_t n, int64_t at) { std::memcpy(data, from + at, size_t(n)); });
  }
  // The bytes themselves where they lie in one piece, else null.
  static std::byte* in_place(const Pieces& pieces, int64_t begin, int64_t end) {
    std::byte* found = nullptr;
    int count = 0;
    pieces.over(begin, end, [&](std::byte* data, int64_t, int64_t) { found = data, ++count; });
    return count == 1 ? found : nullptr;
  }

  std::byte* room(int slot, int index) { return staging_[slot].data() + int64_t(index) * kChunk; }

  void post(bool receives, int slot, int peer, std::byte* data, int64_t bytes, uint64_t tag) {
    Context* context = free_.empty() ? &contexts_.emplace_back() : free_.back();
    if (!free_.empty()) free_.pop_back();
    context->slot = slot, context->peer = peer, context->receives = receives;
    // The sender is part of the tag: messages of a pair keep their order.
    const uint64_t full = tag | uint64_t(receives ? peer : rank_);
    const auto began = std::chrono::steady_clock::now();
    for (;;) {
      const int64_t code = receives ? fi_trecv(endpoint_.value, data, size_t(bytes), nullptr, peers_[size_t(peer)],
                                               full, 0, &context->for_provider)
                                    : fi_tsend(endpoint_.value, data, size_t(bytes), nullptr, peers_[size_t(peer)],
                                               full, &context->for_provider);
      if (code == 0) break;
      if (code != -FI_EAGAIN) lost(gone(peer, int(-code)));
      if (!take_completions(0)) give_up(began);
    }
    ++pending_[slot];
    if (!receives) bytes_sent_ += bytes;
  }

  std::string gone(int peer, int error) const { return "rank " + name_of(peer) + " is gone: " + fi_strerror(error); }
  static std::string failed(const char* call, int error) {
    return std::string("libfabric: ") + call + ": " + fi_strerror(error);
  }

  // A way to a rank broke. What the rendezvous says of it tells more, and may come a moment later.
  [[noreturn]] void lost(const std::string& what) {
    for (int i = 0; i < 300 && !abort_.raised.load(std::memory_order_acquire); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (abort_.raised.load(std::memory_order_acquire)) end(ended_by(abort_.text, where()));
    fail(what);
  }

  // Takes what is complete, waiting at most so many milliseconds for the first.
  bool take_completions(int milliseconds) {
    fi_cq_tagged_entry entries[32];
    const ssize_t count = milliseconds > 0 ? fi_cq_sread(completions_.value, entries, 32, nullptr, milliseconds)
                                           : fi_cq_read(completions_.value, entries, 32);
    if (count == -FI_EAGAIN || count == -FI_EINTR) return false;
    if (count == -FI_EAVAIL) {
      fi_cq_err_entry error{};
      fi_cq_readerr(completions_.value, &error, 0);
      const auto* context = static_cast<Context*>(error.op_context);
      lost(context ? gone(context->peer, error.err) : failed("fi_cq_readerr", error.err));
    }
    // So does a connection that closes while libfabric looks at it (ENOENT, seen in 1.17): it names no rank.
    if (count < 0) lost(failed("fi_cq_read", int(-count)));
    for (ssize_t i = 0; i < count; ++i) {
      auto* context = static_cast<Context*>(entries[i].op_context);
      --pending_[context->slot];
      free_.push_back(context);
    }
    return count > 0;
  }

  // Throws when the world has ended, or nobody came in time.
  void give_up(std::chrono::steady_clock::time_point began) {
    if (abort_.raised.load(std::memory_order_acquire)) end(ended_by(abort_.text, where()));
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() > options_.timeout_seconds)
      fail("another rank did not come within " + std::to_string(int(options_.timeout_seconds)) + " s");
  }

  void wait(int slot) {
    for (int i = 0; i < kPolls && pending_[slot] > 0; ++i) take_completions(0);
    const auto began = std::chrono::steady_clock::now();
    while (pending_[slot] > 0)
      if (!take_completions(20)) give_up(began);
  }

  uint64_t tag() const { return (uint64_t(count_) << 16) & ~kPairTag; }

  static int64_t sum_of(const std::vector<Pieces>& parts) {
    int64_t bytes = 0;
    for (const Pieces& part : parts) bytes += part.bytes();
    return bytes;
  }
  static int64_t longest(const std::vector<Pieces>& parts) {
    int64_t bytes = 0;
    for (const Pieces& part : parts) bytes = std::max(bytes, part.bytes());
    return bytes;
  }

  // Chunk [at, at + kChunk) of what goes to and comes from every other rank.
  void post_sends(const std::vector<Pieces>& send, int64_t at, int slot, uint64_t tag) {
    for (int step = 1; step < size(); ++step) {
      const int r = (rank_ + step) % size();
      const int64_t end = std::min(at + kChunk, send[size_t(r)].bytes());
      if (end <= at) continue;
      std::byte* data = in_place(send[size_t(r)], at, end);
      if (!data) pack(data = room(slot, r), send[size_t(r)], at, end);
      post(false, slot, r, data, end - at, tag);
    }
  }

  void exchange(const std::vector<Pieces>& send, const std::vector<Pieces>& receive, uint64_t pair_tag = 0) {
    const uint64_t tag = pair_tag ? pair_tag : this->tag();
    const int64_t bytes = std::max(longest(send), longest(receive));
    struct Landed {
      int peer;
      int64_t begin, end;
      std::byte* from;
    };
    std::vector<Landed> landed[2];
    const auto finish = [&](int slot) {
      wait(slot);
      for (const Landed& l : landed[slot]) unpack(l.from, receive[size_t(l.peer)], l.begin, l.end);
      landed[slot].clear();
    };
    int slot = 0;
    for (int64_t at = 0; at < bytes; at += kChunk, slot ^= 1) {
      finish(slot);
      for (int r = 0; r < size(); ++r) {
        const int64_t end = std::min(at + kChunk, receive[size_t(r)].bytes());
        if (r == rank_ || end <= at) continue;
        std::byte* data = in_place(receive[size_t(r)], at, end);
        if (!data) landed[slot].push_back({r, at, end, data = room(slot, size() + r)});
        post(true, slot, r, data, end - at, tag);
      }
      post_sends(send, at, slot, tag);
    }
    finish(slot);
    finish(slot ^ 1);
  }

  // Whether steps of pairs are worth it, and give the tree's bits: 16 bits are to be rounded once.
  bool many(DType dtype) const { return size() > options_.direct && (size() & (size() - 1)) == 0 && !is_half(dtype); }

  // Sends to and receives from one rank each, and a step is over.
  void step(int to, const Pieces& data, int from, const Pieces& into) {
    std::vector<Pieces> send(static_cast<size_t>(size())), receive(static_cast<size_t>(size()));
    send[size_t(to)] = data;
    receive[size_t(from)] = into;
    exchange(send, receive);
    ++count_;
  }
  // mine = mine and theirs, the lower rank's first.
  void combine(std::byte* mine, const std::byte* theirs, int64_t bytes, bool lower, DType dtype, Reduction reduction) {
    const std::byte* pair[] = {lower ? mine : theirs, lower ? theirs : mine};
    reduce_tree(pair, mine, bytes, dtype, reduction, options_.rounds_each);
  }

  void double_up(const Pieces& data, DType dtype, Reduction reduction) {
    const int64_t bytes = data.bytes();
    work_.resize(size_t(2 * bytes));
    std::byte *mine = work_.data(), *theirs = mine + bytes;
    pack(mine, data, 0, bytes);
    for (int distance = 1; distance < size(); distance *= 2) {
      const int partner = rank_ ^ distance;
      step(partner, {{mine, bytes}}, partner, {{theirs, bytes}});
      combine(mine, theirs, bytes, rank_ < partner, dtype, reduction);
    }
    unpack(mine, data, 0, bytes);
  }

  // After the step of bit k a rank holds sums of the parts whose numbers end in its own last k + 1 bits.
  void halve(const std::vector<Pieces>& parts, const Pieces& result, DType dtype, Reduction reduction) {
    std::vector<int64_t> at{0};
    for (const Pieces& part : parts) at.push_back(at.back() + part.bytes());
    work_.resize(size_t(2 * at.back()));
    std::byte *mine = work_.data(), *theirs = mine + at.back();
    for (int r = 0; r < size(); ++r) pack(mine + at[size_t(r)], parts[size_t(r)], 0, parts[size_t(r)].bytes());
    for (int distance = 1; distance < size(); distance *= 2) {
      const int partner = rank_ ^ distance, mask = 2 * distance - 1;
      Pieces give, get;
      for (int r = 0; r < size(); ++r) {
        const int64_t begin = at[size_t(r)], bytes = at[size_t(r) + 1] - begin;
        if ((r & mask) == (partner & mask)) give.add({mine + begin, bytes});
        if ((r & mask) == (rank_ & mask)) get.add({theirs + begin, bytes});
      }
      step(partner, give, partner, get);
      for (int r = rank_ & mask; r < size(); r += mask + 1)
        combine(mine + at[size_t(r)], theirs + at[size_t(r)], at[size_t(r) + 1] - at[size_t(r)], rank_ < partner, dtype,
                reduction);
    }
    unpack(mine + at[size_t(rank_)], result, 0, result.bytes());
  }

  void ring(const std::vector<Pieces>& parts) {
    const int n = size();
    for (int i = 0; i + 1 < n; ++i)
      step((rank_ + 1) % n, parts[size_t((rank_ - i + n) % n)], (rank_ - 1 + n) % n,
           parts[size_t((rank_ - i - 1 + n) % n)]);
  }

  void gather(const std::vector<Pieces>& parts) {
    if (size() > options_.direct && sum_of(parts) >= kLarge) return ring(parts);
    std::vector<Pieces> send(size_t(size()), parts[size_t(rank_)]), receive = parts;
    receive[size_t(rank_)] = {};
    exchange(send, receive);
  }

  // What comes for this rank's part lands in staging memory and is reduced chunk by chunk.
  void reduce(const std::vector<Pieces>& parts, const Pieces& result, DType dtype, Reduction reduction) {
    if (many(dtype) && sum_of(parts) <= kSmall * size()) return halve(parts, result, dtype, reduction);
    const Pieces& own = parts[size_t(rank_)];
    const uint64_t tag = this->tag();
    const int64_t bytes = longest(parts);
    const auto post_chunk = [&](int64_t at, int slot) {
      const int64_t end = std::min(at + kChunk, own.bytes());
      for (int r = 0; r < size(); ++r)
        if (r != rank_ && end > at) post(true, slot, r, room(slot, size() + r), end - at, tag);
      post_sends(parts, at, slot, tag);
    };
    post_chunk(0, 0);
    int slot = 0;
    for (int64_t at = 0; at < bytes; at += kChunk, slot ^= 1) {
      if (at + kChunk < bytes) post_chunk(at + kChunk, slot ^ 1);
      wait(slot);
      own.over(at, at + kChunk, [&](std::byte* data, int64_t n, int64_t offset) {
        result.over(at + offset, at + offset + n, [&](std::byte* out, int64_t m, int64_t into) {
          for (int r = 0; r < size(); ++r)
            inputs_[size_t(r)] = r == rank_ ? data + into : room(slot, size() + r) + offset + into;
          reduce_tree(inputs_, out, m, dtype, reduction, options_.rounds_each);
        });
      });
    }
  }

  int rank_;
  FabricOptions options_;
  const AbortFlag& abort_;
  fi_info* info_ = nullptr;
  Handle<fid_fabric> fabric_;
  Handle<fid_domain> domain_;
  Handle<fid_av> addresses_;
  Handle<fid_cq> completions_;
  std::vector<fi_addr_t> peers_;
  std::deque<Context> contexts_;
  std::vector<Context*> free_;
  int64_t pending_[2] = {};
  std::vector<std::byte> staging_[2];  // for each rank a chunk to send and one to receive
  std::vector<const std::byte*> inputs_;
  std::vector<std::byte> work_;  // of the steps of pairs
  bool ended_ = false;
  Handle<fid_ep> endpoint_;  // closed first
  int64_t count_ = 0, operations_ = 0;
  std::string operation_;
};

}  // namespace

}  // namespace strata

extern "C" const strata::FabricLibrary* strata_fabric_v1() {
  static const strata::FabricLibrary library{
      .fingerprint = STRATA_FINGERPRINT,
      .open = [](strata::FabricOptions options, int rank, strata::Rendezvous& meeting, const std::string& key,
                 const strata::AbortFlag& abort) -> std::unique_ptr<strata::Communicator> {
        return std::make_unique<strata::Fabric>(std::move(options), rank, meeting, key, abort);
      }};
  return &library;
}
