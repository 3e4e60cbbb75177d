// A server thread on rank 0 and a client on every rank; see rendezvous.h. Frames: type, length, payload.
#include "comm/rendezvous.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/windows.h"
#include "strata/error.h"

namespace strata {
namespace {

enum Type : uint32_t {
  kHello = 0x53545241,
  kWelcome,
  kRefused,
  kCancelled,
  kPut,
  kGet,
  kValue,
  kAlive,
  kFailed,
  kGoodbye
};
constexpr uint32_t kLargest = 256 << 20;  // of a frame

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string pack(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts) {
    const uint32_t size = uint32_t(part.size());
    all.append(reinterpret_cast<const char*>(&size), 4).append(part);
  }
  return all;
}
std::vector<std::string> unpack(std::string_view all) {
  std::vector<std::string> parts;
  while (all.size() >= 4) {
    uint32_t size;
    std::memcpy(&size, all.data(), 4);
    if (size > all.size() - 4) break;
    parts.emplace_back(all.substr(4, size));
    all.remove_prefix(4 + size);
  }
  return parts;
}

// A socket with what has come and what is to go.
struct Connection {
  int socket = -1;
  int rank = -1;  // once it has said who it is
  double heard = 0;
  bool leaving = false;  // said goodbye
  std::string in, out;

  void add(Type type, const std::string& payload) {
    const uint32_t head[2] = {type, uint32_t(payload.size())};
    out.append(reinterpret_cast<const char*>(head), 8).append(payload);
  }
  // False when the other side is gone.
  bool flush() {
    while (!out.empty()) {
      const ssize_t n = ::send(socket, out.data(), out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
      out.erase(0, size_t(n));
    }
    return true;
  }
  bool fill() {
    char buffer[1 << 16];
    for (;;) {
      const ssize_t n = ::recv(socket, buffer, sizeof buffer, MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
      if (n == 0) return false;
      in.append(buffer, size_t(n));
      heard = now();
    }
  }
  // The next whole frame.
  bool next(uint32_t& type, std::string& payload) {
    if (in.size() < 8) return false;
    uint32_t head[2];
    std::memcpy(head, in.data(), 8);
    if (head[1] > kLargest) {  // not one of ours
      type = 0;
      payload.clear();
      in.clear();
      return true;
    }
    if (in.size() < 8 + size_t(head[1])) return false;
    type = head[0];
    payload = in.substr(8, head[1]);
    in.erase(0, 8 + size_t(head[1]));
    return true;
  }
};

std::string where(const RendezvousOptions& o) { return o.address + ":" + std::to_string(o.port); }

int listen_at(const RendezvousOptions& o) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  const int problem = getaddrinfo(o.address.c_str(), std::to_string(o.port).c_str(), &hints, &found);
  if (problem)
    throw Error("the address " + o.address + " of rank 0 cannot be resolved: " + gai_strerror(problem) + ".");
  const int listening = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int yes = 1;
  setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  const bool right =
      listening >= 0 && bind(listening, found->ai_addr, found->ai_addrlen) == 0 && listen(listening, 1024) == 0;
  const std::string why = std::strerror(errno);
  freeaddrinfo(found);
  if (right) return listening;
  if (listening >= 0) close(listening);
  throw Error("rank 0 cannot listen at " + where(o) + ": " + why + ". Choose another address or port.");
}

// Tries until join_seconds are over: rank 0 may start later.
int connect_to(const RendezvousOptions& o) {
  const double end = now() + o.join_seconds;
  std::string why;
  for (bool first = true; first || now() < end; first = false) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    const int problem = getaddrinfo(o.address.c_str(), std::to_string(o.port).c_str(), &hints, &found);
    if (problem == EAI_NONAME)
      throw Error("rank " + std::to_string(o.rank) + " cannot resolve rank 0's address " + o.address + ": " +
                  gai_strerror(problem) + ".");
    for (addrinfo* one = problem ? nullptr : found; one; one = one->ai_next) {
      const int s = socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
      int error = 0;
      if (connect(s, one->ai_addr, one->ai_addrlen) != 0) error = errno;
      if (error == EINPROGRESS) {
        pollfd wait{s, POLLOUT, 0};
        const int left = int(std::max(1.0, std::min(end - now(), 5.0) * 1000));
        socklen_t length = sizeof error;
        if (poll(&wait, 1, left) <= 0)
          error = ETIMEDOUT;
        else
          getsockopt(s, SOL_SOCKET, SO_ERROR, &error, &length);
      }
      if (error == 0) {
        freeaddrinfo(found);
        const int yes = 1;
        setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        return s;
      }
      why = std::strerror(error);
      close(s);
    }
    if (found && !problem) freeaddrinfo(found);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  throw Error("rank " + std::to_string(o.rank) + " cannot reach rank 0 at " + where(o) + " within " +
              std::to_string(int(o.join_seconds)) + " s: " + why + ".");
}

}  // namespace

// Rank 0's side: one thread, one poll.
class Rendezvous::Server {
 public:
  explicit Server(const RendezvousOptions& options)
      : options_(options), listening_(options.listening >= 0 ? options.listening : listen_at(options)) {
    thread_ = std::thread([this] { run(); });
  }
  ~Server() {
    closing_ = true;
    thread_.join();
    for (auto& [id, c] : connections_) close(c.socket);
    if (listening_ >= 0) close(listening_);
  }

 private:
  void run() {
    const double start = now();
    double leave_by = 0;
    for (;;) {
      std::vector<pollfd> polls{{listening_, POLLIN, 0}};
      std::vector<int> ids{-1};
      for (auto& [id, c] : connections_) {
        polls.push_back({c.socket, short(POLLIN | (c.out.empty() ? 0 : POLLOUT)), 0});
        ids.push_back(id);
      }
      poll(polls.data(), polls.size(), 50);
      if (polls[0].revents) accept_one();
      for (size_t i = 1; i < polls.size(); ++i) {
        const auto at = connections_.find(ids[i]);
        if (at != connections_.end() && polls[i].revents) serve(at->second);
      }
      for (auto at = connections_.begin(); at != connections_.end();) {
        Connection& c = at->second;
        if (c.socket >= 0 && c.flush()) {
          ++at;
          continue;
        }
        lost(c, "its connection closed");
        if (c.socket >= 0) close(c.socket);
        at = connections_.erase(at);
      }
      for (auto& [id, c] : connections_)
        if (c.rank >= 0 && !c.leaving && now() - c.heard > options_.silence_seconds) {
          lost(c, "no sign of life for " + std::to_string(int(options_.silence_seconds)) + " s");
          c.leaving = true;
        }
      if (!complete_ && !failed_ && now() - start > options_.join_seconds) missing();
      if (closing_) {
        if (leave_by == 0) leave_by = now() + (failed_ ? 1 : options_.silence_seconds);
        const bool all_left = std::all_of(connections_.begin(), connections_.end(),
                                          [](const auto& entry) { return entry.second.leaving; });
        if (all_left || now() > leave_by) return;
      }
    }
  }

  void accept_one() {
    const int s = accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (s < 0) return;
    const int yes = 1;
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    connections_[next_id_++] = {.socket = s, .heard = now()};
  }

  void serve(Connection& c) {
    const bool open = c.fill();
    uint32_t type;
    std::string payload;
    while (c.socket >= 0 && c.next(type, payload)) handle(c, type, payload);
    if (!open && c.socket >= 0) {
      lost(c, "its connection closed");
      close(c.socket);
      c.socket = -1;
    }
  }

  void handle(Connection& c, uint32_t type, const std::string& payload) {
    if (c.rank < 0) return welcome(c, type, payload);
    const std::vector<std::string> parts = unpack(payload);
    if (type == kPut && parts.size() == 2) {
      values_[parts[0]] = parts[1];
      for (auto& [id, other] : connections_)
        if (auto& waiting = waiting_[id]; std::erase(waiting, parts[0]) > 0) other.add(kValue, payload);
    } else if (type == kGet) {
      if (const auto found = values_.find(payload); found != values_.end())
        c.add(kValue, pack({payload, found->second}));
      else
        waiting_[id_of(c)].push_back(payload);
    } else if (type == kFailed) {
      const Error error = ended_by(payload);
      failed(passed_on("rank " + std::to_string(c.rank) + " failed: " + error.what(), error.code()), c.rank);
      c.leaving = true;
    } else if (type == kAlive) {
      c.add(kAlive, "");  // so that the rank hears from rank 0, too
    } else if (type == kGoodbye) {
      c.leaving = true;
    }
  }

  void welcome(Connection& c, uint32_t type, const std::string& payload) {
    const std::vector<std::string> hello = unpack(payload);
    const auto refuse = [&](const std::string& why) {
      c.add(kRefused, why);
      c.flush();
      close(c.socket);
      c.socket = -1;
    };
    if (type != kHello || hello.size() != 4) return refuse("this is not a rank of Strata.");
    const int rank = std::atoi(hello[2].c_str());
    if (hello[0] != options_.token) return refuse("rank 0 there belongs to another job (its token differs).");
    if (hello[1] != options_.version)
      return cancel("rank 0 runs version " + options_.version + " of Strata, rank " + hello[2] + " version " +
                    hello[1] + "; install one version everywhere.");
    if (hello[3] != std::to_string(options_.size) || rank < 0 || rank >= options_.size)
      return cancel("rank 0 was started for " + std::to_string(options_.size) + " ranks, rank " + hello[2] + " for " +
                    hello[3] + ".");
    for (const auto& [id, other] : connections_)
      if (other.rank == rank) return refuse("two processes say that they are rank " + hello[2] + ".");
    c.rank = rank;
    if (failed_) c.add(complete_ ? kFailed : kCancelled, why_);
    const int64_t known = std::count_if(connections_.begin(), connections_.end(),
                                        [](const auto& entry) { return entry.second.rank >= 0; });
    if (known < options_.size) return;
    complete_ = true;
    for (auto& [id, other] : connections_)
      if (other.rank >= 0) other.add(kWelcome, "");
  }

  void missing() {
    std::vector<bool> here(size_t(options_.size), false);
    for (const auto& [id, c] : connections_)
      if (c.rank >= 0) here[size_t(c.rank)] = true;
    std::string names;
    int count = 0;
    for (int r = 0; r < options_.size; ++r)
      if (!here[size_t(r)]) names += (count++ ? ", " : "") + std::to_string(r);
    cancel((count == 1 ? "rank " : "ranks ") + names + " did not come to the rendezvous at " + where(options_) +
           " within " + std::to_string(int(options_.join_seconds)) + " s.");
  }

  // The job cannot begin: everybody who is here is told, and rank 0 tells the user.
  void cancel(const std::string& why) {
    if (failed_) return;
    failed_ = true;
    why_ = why;
    for (auto& [id, c] : connections_) c.add(kCancelled, why);
  }

  void lost(Connection& c, const std::string& how) {
    if (c.rank < 0 || c.leaving) return;
    failed("rank " + std::to_string(c.rank) + " is gone (" + how + ")", c.rank);
  }

  void failed(const std::string& why, int from) {
    if (failed_) return;
    failed_ = true;
    why_ = why;
    for (auto& [id, c] : connections_)
      if (c.rank != from) c.add(kFailed, why);
  }

  int id_of(const Connection& c) const {
    for (const auto& [id, other] : connections_)
      if (&other == &c) return id;
    return -1;
  }

  const RendezvousOptions options_;
  int listening_;
  std::map<int, Connection> connections_;
  std::map<int, std::vector<std::string>> waiting_;
  std::map<std::string, std::string> values_;
  int next_id_ = 0;
  bool complete_ = false, failed_ = false;
  std::string why_;
  std::atomic<bool> closing_{false};
  std::thread thread_;
};

class Rendezvous::Client {
 public:
  Client(const RendezvousOptions& options, std::function<void(const std::string&)> ended)
      : options_(options), ended_(std::move(ended)) {
    connection_.socket = connect_to(options);
    connection_.heard = now();
    connection_.add(kHello,
                    pack({options.token, options.version, std::to_string(options.rank), std::to_string(options.size)}));
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    thread_ = std::thread([this] { run(); });
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return welcome_ || over_; });
    if (welcome_) return;
    const std::string why = why_;
    lock.unlock();
    const bool cancelled = cancelled_;
    stop();
    if (cancelled) throw JobCancelled(why);
    throw Error("rank " + std::to_string(options.rank) + ": " + why);
  }
  ~Client() { stop(); }

  void put(const std::string& key, const std::string& value) { post(kPut, pack({key, value})); }
  std::string get(const std::string& key) {
    post(kGet, key);
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return values_.contains(key) || over_; });
    const auto found = values_.find(key);
    if (found == values_.end()) throw ended_by(why_);
    std::string value = std::move(found->second);
    values_.erase(found);
    return value;
  }
  bool await(const std::string& key, double seconds) {
    post(kGet, key);
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return values_.contains(key) || over_; });
    return values_.contains(key);
  }
  void fail(const std::string& why) { post(kFailed, why); }
  std::string local_address() const {
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    char text[NI_MAXHOST] = {};
    getsockname(connection_.socket, reinterpret_cast<sockaddr*>(&own), &length);
    getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
    return text;
  }

 private:
  void post(Type type, const std::string& payload) {
    {
      std::lock_guard lock(mutex_);
      connection_.add(type, payload);
    }
    const uint64_t one = 1;
    (void)!write(wake_, &one, sizeof one);
  }

  void stop() {
    if (!thread_.joinable()) return;
    stopping_ = true;
    post(kGoodbye, "");
    thread_.join();
    close(connection_.socket);
    close(wake_);
  }

  void run() {
    double said = 0;
    for (;;) {
      pollfd polls[2] = {{connection_.socket, POLLIN, 0}, {wake_, POLLIN, 0}};
      {
        std::lock_guard lock(mutex_);
        if (!connection_.out.empty()) polls[0].events |= POLLOUT;
      }
      poll(polls, 2, 50);
      uint64_t drained;
      (void)!read(wake_, &drained, sizeof drained);
      std::unique_lock lock(mutex_);
      if (now() - said > options_.silence_seconds / 5) {
        connection_.add(kAlive, "");
        said = now();
      }
      const bool open = connection_.flush() && connection_.fill();
      uint32_t type;
      std::string payload;
      while (connection_.next(type, payload)) {
        if (type == kWelcome) {
          welcome_ = true;
          changed_.notify_all();
        } else if (type == kValue) {
          auto parts = unpack(payload);
          if (parts.size() == 2) values_[parts[0]] = parts[1];
          changed_.notify_all();
        } else if (type == kFailed || type == kRefused || type == kCancelled) {
          cancelled_ |= type == kCancelled;
          over(lock, payload);
        }
      }
      if (stopping_ && (connection_.out.empty() || !open)) return;
      if (!open && !stopping_) {
        over(lock, "rank 0 is gone (its connection closed)");
        changed_.wait_for(lock, std::chrono::milliseconds(50));
      }
      if (now() - connection_.heard > options_.silence_seconds && welcome_ && options_.rank != 0)
        over(lock, "rank 0 is gone (no sign of life for " + std::to_string(int(options_.silence_seconds)) + " s)");
    }
  }

  void over(std::unique_lock<std::mutex>& lock, const std::string& why) {
    if (over_) return;
    over_ = true;
    why_ = why;
    changed_.notify_all();
    lock.unlock();
    if (welcome_) ended_(why);
    lock.lock();
  }

  const RendezvousOptions options_;
  std::function<void(const std::string&)> ended_;
  Connection connection_;
  int wake_ = -1;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  bool welcome_ = false, over_ = false, cancelled_ = false;
  std::string why_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

Rendezvous::Rendezvous(RendezvousOptions options, std::function<void(const std::string&)> ended) {
  if (options.rank == 0) server_ = std::make_unique<Server>(options);
  client_ = std::make_unique<Client>(options, std::move(ended));
}
Rendezvous::~Rendezvous() {
  client_.reset();
  server_.reset();
}
void Rendezvous::put(const std::string& key, const std::string& value) { client_->put(key, value); }
std::string Rendezvous::get(const std::string& key) { return client_->get(key); }
bool Rendezvous::await(const std::string& key, double seconds) { return client_->await(key, seconds); }
std::string Rendezvous::local_address() const { return client_->local_address(); }
void Rendezvous::fail(const std::string& why) { client_->fail(why); }

}  // namespace strata
