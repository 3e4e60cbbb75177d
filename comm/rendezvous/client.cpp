// See client.h.
#include "comm/rendezvous/client.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "comm/rendezvous/proof.h"
#include "comm/rendezvous/server.h"
#include "comm/windows.h"
#include "strata/threads.h"

namespace strata {
namespace {

std::string name_of(const RendezvousOptions& o) { return "rank " + std::to_string(o.rank); }

int milliseconds_to(double end) { return int(std::clamp((end - seconds_now()) * 1000, 1.0, 5000.0)); }

// A connected socket, or -1 and why there is none.
int connect_once(const RendezvousOptions& o, double end, std::string& why) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  const int problem = getaddrinfo(o.address.c_str(), std::to_string(o.port).c_str(), &hints, &found);
  if (problem) why = gai_strerror(problem);
  if (problem == EAI_NONAME)
    throw Error(name_of(o) + " cannot resolve rank 0's address " + o.address + ": " + why + ".");
  if (problem) return -1;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> list(found, freeaddrinfo);
  for (const addrinfo* one = found; one; one = one->ai_next) {
    const int s = socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (s < 0) {
      why = std::strerror(errno);
      continue;
    }
    int error = connect(s, one->ai_addr, one->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      pollfd wait{s, POLLOUT, 0};
      socklen_t length = sizeof error;
      if (poll(&wait, 1, milliseconds_to(end)) <= 0)
        error = ETIMEDOUT;
      else
        getsockopt(s, SOL_SOCKET, SO_ERROR, &error, &length);
    }
    if (error == 0) {
      const int yes = 1;
      setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
      return s;
    }
    why = std::strerror(error);
    close(s);
  }
  return -1;
}

// Talks with rank 0 until both have proved who they are. True then; false when the connection closed, with why.
class Introduction {
 public:
  Introduction(const RendezvousOptions& options, Connection& connection)
      : options_(options),
        connection_(connection),
        claim_{.rank_nonce = make_nonce(),
               .zero_nonce = "",
               .rank = uint64_t(options.rank),
               .size = uint64_t(options.size),
               .version = options.version,
               .job = options.token} {}

  bool make(double end, std::string& why) {
    connection_.send(FrameType::hello,
                     FieldWriter().text(kProtocol).number(claim_.rank).text(claim_.rank_nonce).payload());
    for (;;) {
      pollfd wait{connection_.socket(), short(POLLIN | (connection_.sending() ? POLLOUT : 0)), 0};
      poll(&wait, 1, milliseconds_to(end));
      const bool open = connection_.exchange();
      for (Frame frame; connection_.next(frame);)
        if (take(frame)) return true;
      if (!open) {
        why = "it closes the connection before it has said who it is";
        return false;
      }
      if (seconds_now() > end)
        throw Error(name_of(options_) + ": what listens at " + place_of(options_) +
                    " does not answer as rank 0 of this job. Either rank 0 is stopped, or the port is another "
                    "program's; choose another port then.");
    }
  }

 private:
  bool take(const Frame& frame) {
    FieldReader fields(frame.payload);
    if (frame.type == FrameType::challenge && claim_.zero_nonce.empty()) {
      claim_.zero_nonce = fields.text();
      if (claim_.zero_nonce.size() < 16 || !fields.complete()) wrong();
      connection_.send(FrameType::proof, FieldWriter()
                                             .text(prove(options_.secret, Side::rank, claim_))
                                             .number(claim_.size)
                                             .text(claim_.version)
                                             .payload());
      connection_.flush();
      return false;
    }
    if (frame.type == FrameType::refused) refused(JoinRefusal(fields.number()));
    if (frame.type != FrameType::accepted || claim_.zero_nonce.empty() ||
        !proves(options_.secret, Side::zero, claim_, fields.text()))
      wrong();
    connection_.trust();
    return true;
  }

  [[noreturn]] void refused(JoinRefusal why) {
    const std::string who = name_of(options_) + ": rank 0 at " + place_of(options_);
    if (why == JoinRefusal::another_job)
      throw Error(who +
                  " belongs to another job (its token differs), or knows another secret. Jobs beside each other need "
                  "ports of their own, all ranks of one the same STRATA_SECRET or STRATA_SECRET_FILE.");
    if (why == JoinRefusal::rank_taken)
      throw Error("two processes say that they are " + name_of(options_) + "; rank 0 at " + place_of(options_) +
                  " has turned this one away.");
    if (why == JoinRefusal::other_protocol)
      throw Error(who + " runs another version of Strata; install one version everywhere.");
    wrong();
  }
  [[noreturn]] void wrong() {
    throw Error(name_of(options_) + ": what listens at " + place_of(options_) +
                " does not prove that it is rank 0 of this job; choose another port.");
  }

  const RendezvousOptions& options_;
  Connection& connection_;
  Claim claim_;
};

}  // namespace

RendezvousClient::RendezvousClient(const RendezvousOptions& options, std::function<void(const std::string&)> ended)
    : options_(options), ended_(std::move(ended)) {
  join();
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ < 0)
    throw Error(name_of(options) + ": cannot make an event: " + std::strerror(errno) + ".", ExitCode::failed);
  thread_ = start_thread("the rendezvous", [this] { run(); });
  std::unique_lock lock(mutex_);
  // Rank 0 lives and knows when enough is enough; should it not, this is not for ever.
  const double longest = options.join_seconds + options.silence_seconds + 10;
  const bool told = changed_.wait_for(lock, std::chrono::duration<double>(longest), [&] { return welcome_ || over_; });
  if (welcome_) return;
  const std::string why = told ? why_ : "rank 0 did not begin the job within " + limit_text(longest) + ".";
  const std::optional<ExitCode> cancelled = cancelled_;
  lock.unlock();
  stop();
  if (cancelled) throw JobCancelled(why, *cancelled);
  throw Error(name_of(options) + ": " + why, ExitCode::failed);
}

// Tries until join_seconds are over: rank 0 may start later.
void RendezvousClient::join() {
  const double end = seconds_now() + options_.join_seconds;
  std::string why;
  do {
    const int socket = connect_once(options_, end, why);
    if (socket >= 0) {
      connection_ = std::make_unique<Connection>(socket);
      if (Introduction(options_, *connection_).make(end, why)) return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  } while (seconds_now() < end);
  throw Error(name_of(options_) + " cannot reach rank 0 at " + place_of(options_) + " within " +
              limit_text(options_.join_seconds) + ": " + why +
              ". If rank 0 ended with an error of its own, that is the cause.");
}

std::vector<std::string> RendezvousClient::collect(const std::string& key, const std::vector<int>& members,
                                                   const std::string& text, Answer answer, double seconds) {
  const auto own = std::find(members.begin(), members.end(), options_.rank);
  STRATA_CHECK(own != members.end());
  post(FrameType::collect, FieldWriter()
                               .text(key)
                               .number(uint64_t(own - members.begin()))
                               .number(members.size())
                               .number(uint64_t(answer))
                               .number(uint64_t(std::max(0.0, seconds) * 1000))
                               .text(text)
                               .payload());
  if (answer == Answer::none) return {};
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return texts_.contains(key) || over_; });
  const auto found = texts_.find(key);
  if (found == texts_.end()) throw ended_by(why_);
  const Texts result = std::move(found->second);
  texts_.erase(found);
  if (result.late.empty()) return result.texts;
  std::string names;
  for (uint64_t member : result.late)
    if (member < members.size()) names += (names.empty() ? "" : ", ") + std::to_string(members[size_t(member)]);
  throw Error("exchange of texts over the rendezvous (" + key + "): " + (result.late.size() == 1 ? "rank " : "ranks ") +
                  names + " did not come within " + limit_text(seconds) + ".",
              ExitCode::failed);
}

std::vector<int> RendezvousClient::missing(double seconds) {
  std::unique_lock lock(mutex_);
  const uint64_t number = ++inquiries_;
  lock.unlock();
  post(FrameType::waiting, FieldWriter().number(number).number(uint64_t(std::max(0.0, seconds) * 1000)).payload());
  lock.lock();
  changed_.wait(lock, [&] { return missing_.contains(number) || over_; });
  const auto found = missing_.find(number);
  if (found == missing_.end()) throw ended_by(why_);
  const std::vector<int> result = std::move(found->second);
  missing_.erase(found);
  return result;
}

std::string RendezvousClient::local_address() const {
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  char text[NI_MAXHOST] = {};
  getsockname(connection_->socket(), reinterpret_cast<sockaddr*>(&own), &length);
  getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

void RendezvousClient::post(FrameType type, const std::string& payload) {
  Packed frame = pack(type, payload);
  {
    std::lock_guard lock(mutex_);
    connection_->send(std::move(frame));
  }
  const uint64_t one = 1;
  (void)!write(wake_, &one, sizeof one);
}

void RendezvousClient::stop() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  post(FrameType::goodbye, "");
  thread_.join();
  connection_->close();
  close(wake_);
}

void RendezvousClient::run() {
  try {
    talk();
  } catch (const std::exception& error) {  // no memory, most likely
    std::unique_lock lock(mutex_);
    over(lock, name_of(options_) + " cannot go on with the rendezvous: " + error.what());
    connection_->close();
  }
}

void RendezvousClient::talk() {
  const int pause = int(std::clamp(options_.silence_seconds * 50, 10.0, 500.0));
  double said = 0, last = seconds_now(), stop_by = 0;
  for (bool first = true;; first = false) {
    pollfd polls[2] = {{connection_->socket(), POLLIN, 0}, {wake_, POLLIN, 0}};
    {
      std::lock_guard lock(mutex_);
      if (connection_->sending()) polls[0].events |= POLLOUT;
    }
    poll(polls, 2, first ? 0 : pause);  // something may have come with rank 0's proof
    uint64_t drained;
    (void)!read(wake_, &drained, sizeof drained);
    std::unique_lock lock(mutex_);
    const double now = seconds_now();
    if (now - last > pause / 1000.0 + 1) connection_->heard += now - last;  // this process stood still itself
    last = now;
    if (!connection_->sending() && now - said > options_.silence_seconds / 5) {
      connection_->send(FrameType::alive);
      said = now;
    }
    const bool open = connection_->exchange();
    for (Frame frame; connection_->next(frame);) take(lock, frame);
    if (stopping_) {  // with last words, unless nobody takes them
      if (stop_by == 0) stop_by = now + (over_ ? 1 : options_.silence_seconds);
      if (!connection_->sending() || !open || now > stop_by) return;
    }
    if (!open) {
      over(lock, "rank 0 is gone (its connection closed)");
      changed_.wait_for(lock, std::chrono::milliseconds(50));
    }
    // Where rank 0 is this process, it is as silent as this one.
    if (now - connection_->heard > options_.silence_seconds && options_.rank != 0)
      over(lock, "rank 0 is gone (no sign of life for " + limit_text(options_.silence_seconds) + ")");
  }
}

void RendezvousClient::take(std::unique_lock<std::mutex>& lock, const Frame& frame) {
  FieldReader fields(frame.payload);
  if (frame.type == FrameType::welcome) {
    welcome_ = true;
  } else if (frame.type == FrameType::texts) {
    Texts& answer = texts_[std::string(fields.text())];
    const uint64_t count = fields.number();
    for (uint64_t i = 0; i < count && i < uint64_t(options_.size); ++i) answer.texts.emplace_back(fields.text());
  } else if (frame.type == FrameType::late) {
    Texts& answer = texts_[std::string(fields.text())];
    const uint64_t count = fields.number();
    for (uint64_t i = 0; i < count && i < uint64_t(options_.size); ++i) answer.late.push_back(fields.number());
  } else if (frame.type == FrameType::missing) {
    std::vector<int>& ranks = missing_[fields.number()];
    const uint64_t count = fields.number();
    for (uint64_t i = 0; i < count && i < uint64_t(options_.size); ++i) ranks.push_back(int(fields.number()));
  } else if (frame.type == FrameType::failed) {
    over(lock, frame.payload);
  } else if (frame.type == FrameType::cancelled) {
    if (!over_) cancelled_ = ExitCode(fields.number());
    over(lock, std::string(fields.text()));
  }
  changed_.notify_all();
}

void RendezvousClient::over(std::unique_lock<std::mutex>& lock, const std::string& why) {
  if (over_) return;
  over_ = true;
  why_ = why;
  changed_.notify_all();
  const bool begun = welcome_;
  lock.unlock();
  if (begun) ended_(why);
  lock.lock();
}

}  // namespace strata
