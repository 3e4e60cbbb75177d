// See server.h.
#include "comm/rendezvous/server.h"

#include <dirent.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/windows.h"
#include "strata/threads.h"

namespace strata {
namespace {

constexpr double kLastWords = 5;    // seconds for ranks to hear why the job ends
constexpr size_t kStrangers = 256;  // connections at a time, beside those of the job's ranks

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
      listening >= 0 && bind(listening, found->ai_addr, found->ai_addrlen) == 0 && listen(listening, SOMAXCONN) == 0;
  const std::string why = std::strerror(errno);
  freeaddrinfo(found);
  if (right) return listening;
  if (listening >= 0) close(listening);
  throw Error("rank 0 cannot listen at " + place_of(o) + ": " + why + ". Choose another address or port.");
}

// Makes sure that all ranks can connect, and returns how many strangers may beside them.
size_t reserve_files(int size) {
  constexpr size_t kSpare = 32;  // for what else a rank opens meanwhile, and for a few strangers
  size_t open = 0;
  if (DIR* const folder = opendir("/proc/self/fd")) {
    while (readdir(folder)) ++open;
    closedir(folder);
  }
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const size_t least = open + size_t(size) + kSpare;
  const rlim_t wanted = std::min<rlim_t>(least + kStrangers, limit.rlim_max);
  if (limit.rlim_cur < wanted) {
    limit.rlim_cur = wanted;
    setrlimit(RLIMIT_NOFILE, &limit);
    getrlimit(RLIMIT_NOFILE, &limit);
  }
  if (limit.rlim_cur < least)
    throw Error("rank 0 of " + std::to_string(size) + " ranks needs " + std::to_string(least) +
                " open files, and the limit is " + std::to_string(limit.rlim_cur) + "; raise it (ulimit -n).");
  return std::min(kStrangers, size_t(limit.rlim_cur) - least + kSpare / 2);
}

}  // namespace

RendezvousServer::RendezvousServer(const RendezvousOptions& options)
    : options_(options),
      most_strangers_(reserve_files(options.size) + size_t(options.size)),
      by_rank_(size_t(options.size)),
      came_(size_t(options.size)),
      left_(size_t(options.size)),
      waited_(size_t(options.size)) {
  listening_ = options.listening >= 0 ? options.listening : listen_at(options);
  fcntl(listening_, F_SETFL, fcntl(listening_, F_GETFL) | O_NONBLOCK);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  try {
    thread_ = start_thread("the rendezvous of rank 0", [this] { run(); });
  } catch (...) {
    close(listening_);
    close(wake_);
    throw;
  }
}

RendezvousServer::~RendezvousServer() {
  closing_ = true;
  const uint64_t one = 1;
  (void)!write(wake_, &one, sizeof one);
  thread_.join();
  close(listening_);
  close(wake_);
}

void RendezvousServer::run() {
  try {
    serve();
  } catch (const std::exception& error) {  // no memory, most likely
    failed(std::string("rank 0 cannot go on with the rendezvous: ") + error.what(), -1);
    for (Peer& peer : peers_) peer.flush();
  }
  peers_.clear();  // who has not been told sees its connection close
}

void RendezvousServer::serve() {
  // Often enough to notice everything in time.
  const int pause = int(std::clamp(options_.silence_seconds * 50, 10.0, 500.0));
  std::vector<pollfd> polls;
  std::vector<Peer*> polled;
  double last = seconds_now();
  while (!may_close()) {
    polls.assign({{last < deaf_until_ ? -1 : listening_, POLLIN, 0}, {wake_, POLLIN, 0}});
    polled.clear();
    for (Peer& peer : peers_) {
      polls.push_back({peer.socket(), short(POLLIN | (peer.sending() ? POLLOUT : 0)), 0});
      polled.push_back(&peer);
    }
    poll(polls.data(), polls.size(), pause);
    uint64_t drained;
    (void)!read(wake_, &drained, sizeof drained);
    const double now = seconds_now();
    // This process stood still itself (stopped, or a machine asleep): others are not to blame.
    const double stood = now - last > pause / 1000.0 + 1 ? now - last : 0;
    last = now;
    if (stood > 0) forgive(stood);
    for (size_t i = 0; i < polled.size(); ++i) {
      if (!(polls[i + 2].revents & ~POLLOUT)) continue;
      if (!hear(*polled[i])) end(*polled[i]);
    }
    if (polls[0].revents) accept_some();
    for (Peer& peer : peers_) look_after(peer, now);
    look_after_rounds(now);
    if (!complete_ && !failed_ && now - began_ > options_.join_seconds) missing_ranks();
    for (Peer*& peer : by_rank_)
      if (peer && !peer->open()) peer = nullptr;
    peers_.remove_if([](const Peer& peer) { return !peer.open(); });
  }
}

// Takes what has come; false when no more will.
bool RendezvousServer::hear(Peer& peer) {
  const bool more = peer.fill();
  for (Frame frame; peer.open() && peer.next(frame);) take(peer, frame);
  return more && peer.open();
}

void RendezvousServer::end(Peer& peer) {
  if (peer.open()) lost(peer, "its connection closed");
  peer.close();
}

void RendezvousServer::forgive(double seconds) {
  began_ += seconds;
  for (Peer& peer : peers_) {
    peer.heard += seconds;
    peer.since += seconds;
  }
  for (auto& [key, round] : rounds_)
    if (round.until > 0) round.until += seconds;
}

// Whether everything is over: all have left, or have had their time to.
bool RendezvousServer::may_close() {
  if (!closing_) return false;
  const double now = seconds_now();
  if (leave_by_ == 0)
    leave_by_ = now + (failed_ ? std::min(kLastWords, options_.silence_seconds) : options_.silence_seconds);
  const bool all_left = std::all_of(peers_.begin(), peers_.end(), [](const Peer& p) { return !p.known || p.leaving; });
  // Ranks that come to a job that has been cancelled hear it, too, if they are not much later.
  const bool all_came = std::find(came_.begin(), came_.end(), false) == came_.end();
  const bool too_late = now - began_ > options_.join_seconds;
  return (all_left && (complete_ || all_came || too_late || !failed_)) || now > leave_by_;
}

void RendezvousServer::accept_some() {
  constexpr int kAtOnce = 64;
  for (int i = 0; i < kAtOnce; ++i) {
    const int s = accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (s < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)) {
      drop_oldest_stranger();
      deaf_until_ = seconds_now() + 0.1;
    }
    if (s < 0) return;
    const int yes = 1;
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    peers_.emplace_back(s);
    const size_t strangers =
        size_t(std::count_if(peers_.begin(), peers_.end(), [](const Peer& p) { return !p.known && p.open(); }));
    if (strangers > most_strangers_) drop_oldest_stranger();
  }
}

// A rank that is hit comes again.
void RendezvousServer::drop_oldest_stranger() {
  for (Peer& peer : peers_)
    if (!peer.known && peer.open()) return peer.close();
}

void RendezvousServer::look_after(Peer& peer, double now) {
  if (!peer.open()) return;
  if (!peer.known) {
    if (!peer.flush() || now - peer.since > options_.introduction_seconds) peer.close();
    return;
  }
  if (!peer.sending() && now - peer.told > options_.silence_seconds / 5) {
    peer.send(FrameType::alive);
    peer.told = now;
  }
  if (!peer.flush()) {  // what it said last is told before it is called lost
    hear(peer);
    return end(peer);
  }
  if (peer.leaving || now - peer.heard <= options_.silence_seconds) return;
  lost(peer, "no sign of life for " + limit_text(options_.silence_seconds));
  peer.leaving = true;
}

void RendezvousServer::take(Peer& peer, const Frame& frame) {
  if (!peer.known) {
    if (frame.type == FrameType::hello && peer.claim.zero_nonce.empty()) return greet(peer, frame);
    if (frame.type == FrameType::proof && !peer.claim.zero_nonce.empty()) return admit(peer, frame);
    return peer.close();
  }
  if (frame.type == FrameType::collect) return collect(peer, frame);
  if (frame.type == FrameType::waiting) {
    FieldReader fields(frame.payload);
    const uint64_t number = fields.number(), milliseconds = fields.number();
    waited_[size_t(peer.rank())] = true;
    inquiries_.push_back({peer.rank(), number, seconds_now() + double(milliseconds) / 1000});
  } else if (frame.type == FrameType::failed) {
    const Error error = ended_by(frame.payload);
    const std::string why = "rank " + std::to_string(peer.rank()) + " failed: " + error.what();
    peer.leaving = true;
    if (complete_)
      failed(passed_on(why, error.code()), peer.rank());
    else
      cancel(why, error.code());
  } else if (frame.type == FrameType::goodbye) {
    peer.leaving = left_[size_t(peer.rank())] = true;
    const bool needed = std::any_of(rounds_.begin(), rounds_.end(), [&](const auto& entry) {
      return entry.second.came.size() == left_.size() && !entry.second.came[size_t(peer.rank())];
    });
    if (needed) has_left(peer.rank());
  } else if (frame.type != FrameType::alive) {
    damaged(peer);
  }
}

void RendezvousServer::greet(Peer& peer, const Frame& frame) {
  FieldReader fields(frame.payload);
  const std::string_view protocol = fields.text();
  if (protocol != kProtocol)
    return protocol.starts_with("strata") ? refuse(peer, JoinRefusal::other_protocol) : peer.close();
  peer.claim.rank = fields.number();
  peer.claim.rank_nonce = fields.text();
  if (!fields.complete() || peer.claim.rank_nonce.size() < 16) return peer.close();
  peer.claim.zero_nonce = make_nonce();
  peer.send(FrameType::challenge, FieldWriter().text(peer.claim.zero_nonce).payload());
}

void RendezvousServer::admit(Peer& peer, const Frame& frame) {
  FieldReader fields(frame.payload);
  const std::string_view proof = fields.text();
  peer.claim.size = fields.number();
  peer.claim.version = fields.text();
  peer.claim.job = options_.token;
  if (!fields.complete() || !proves(options_.secret, Side::rank, peer.claim, proof))
    return refuse(peer, JoinRefusal::another_job);
  const uint64_t rank = peer.claim.rank;
  if (rank < came_.size() && came_[rank]) return refuse(peer, JoinRefusal::rank_taken);
  peer.trust();
  peer.send(FrameType::accepted, FieldWriter().text(prove(options_.secret, Side::zero, peer.claim)).payload());
  const std::string name = std::to_string(rank);
  if (peer.claim.version != options_.version)
    cancel("rank 0 runs version " + options_.version + " of Strata, rank " + name + " version " + peer.claim.version +
               "; install one version everywhere.",
           ExitCode::usage);
  else if (peer.claim.size != uint64_t(options_.size) || rank >= peer.claim.size)
    cancel("rank 0 was started for " + std::to_string(options_.size) + " ranks, rank " + name + " for " +
               std::to_string(peer.claim.size) + ".",
           ExitCode::usage);
  if (rank < by_rank_.size()) {
    by_rank_[rank] = &peer;
    came_[rank] = true;
    peer.known = true;
  }
  if (failed_) peer.send(FrameType::cancelled, FieldWriter().number(uint64_t(code_)).text(why_).payload());
  if (failed_ || complete_ || std::find(came_.begin(), came_.end(), false) != came_.end()) return;
  complete_ = true;
  for (Peer* one : by_rank_) one->send(FrameType::welcome);
}

void RendezvousServer::refuse(Peer& peer, JoinRefusal why) {
  peer.send(FrameType::refused, FieldWriter().number(uint64_t(why)).payload());
  peer.flush();
  peer.close();
}

void RendezvousServer::collect(Peer& peer, const Frame& frame) {
  if (failed_) return;  // it has been told
  FieldReader fields(frame.payload);
  const std::string key(fields.text());
  const uint64_t member = fields.number(), members = fields.number(), wanted = fields.number();
  const uint64_t milliseconds = fields.number();
  const std::string_view text = fields.text();
  Round& round = rounds_[key];
  if (round.count == 0 && members >= 1 && members <= by_rank_.size()) {
    round.texts.resize(members);
    round.came.resize(members);
  }
  if (!fields.complete() || members != round.texts.size() || member >= members || round.came[member] ||
      wanted > uint64_t(Answer::none))
    return damaged(peer);
  round.texts[member] = text;
  round.came[member] = true;
  ++round.count;
  if (milliseconds > 0 && round.until == 0) round.until = seconds_now() + double(milliseconds) / 1000;
  if (Answer(wanted) != Answer::none) round.waiting.emplace_back(peer.rank(), Answer(wanted));
  if (round.count == members) {
    answer(key, round);
    rounds_.erase(key);
    return;
  }
  // Only rounds of all ranks say who their members are.
  for (size_t r = 0; members == left_.size() && r < members; ++r)
    if (left_[r] && !round.came[r]) return has_left(int(r));
}

// One frame with all texts, however many get it.
void RendezvousServer::answer(const std::string& key, Round& round) {
  Packed frames[2];
  for (const auto& [rank, wanted] : round.waiting) {
    Packed& frame = frames[int(wanted)];
    const size_t count = wanted == Answer::all ? round.texts.size() : 1;
    if (!frame) {
      FieldWriter fields;
      fields.text(key).number(count);
      for (size_t i = 0; i < count; ++i) fields.text(round.texts[i]);
      frame = pack(FrameType::texts, fields.payload());
    }
    if (Peer* const peer = of_rank(rank)) peer->send(frame);
  }
}

void RendezvousServer::look_after_rounds(double now) {
  for (auto at = rounds_.begin(); at != rounds_.end();) {
    const Round& round = at->second;
    if (round.until == 0 || now <= round.until) {
      ++at;
      continue;
    }
    FieldWriter fields;
    fields.text(at->first).number(round.texts.size() - round.count);
    for (size_t i = 0; i < round.came.size(); ++i)
      if (!round.came[i]) fields.number(i);
    const Packed frame = pack(FrameType::late, fields.payload());
    for (const auto& [rank, wanted] : round.waiting)
      if (Peer* const peer = of_rank(rank)) peer->send(frame);
    at = rounds_.erase(at);
  }
  const bool all = std::find(waited_.begin(), waited_.end(), false) == waited_.end();
  std::erase_if(inquiries_, [&](const Inquiry& inquiry) {
    if (!all && now <= inquiry.until) return false;
    answer(inquiry);
    return true;
  });
}

void RendezvousServer::answer(const Inquiry& inquiry) {
  FieldWriter fields;
  fields.number(inquiry.number).number(uint64_t(std::count(waited_.begin(), waited_.end(), false)));
  for (size_t r = 0; r < waited_.size(); ++r)
    if (!waited_[r]) fields.number(r);
  if (Peer* const peer = of_rank(inquiry.rank)) peer->send(FrameType::missing, fields.payload());
}

void RendezvousServer::damaged(Peer& peer) {
  lost(peer, "it sent what no rank sends");
  peer.close();
}

RendezvousServer::Peer* RendezvousServer::of_rank(int rank) {
  Peer* const peer = by_rank_[size_t(rank)];
  return peer && peer->open() ? peer : nullptr;
}

void RendezvousServer::missing_ranks() {
  std::string names;
  int count = 0;
  for (size_t r = 0; r < came_.size(); ++r)
    if (!came_[r] && ++count <= 16) names += (count > 1 ? ", " : "") + std::to_string(r);
  if (count > 16) names += " and " + std::to_string(count - 16) + " more";
  cancel((count == 1 ? "rank " : "ranks ") + names + " did not come to the rendezvous at " + place_of(options_) +
             " within " + limit_text(options_.join_seconds) + ".",
         ExitCode::usage);
}

// The job cannot begin: everybody who is here, or comes yet, is told, and rank 0 tells the user.
void RendezvousServer::cancel(const std::string& why, ExitCode code) {
  if (failed_) return;
  failed_ = true;
  why_ = why.substr(0, kStrangersFrame / 2);  // who has just come takes no more yet
  code_ = code;
  for (Peer& peer : peers_)
    if (peer.known && peer.open())
      peer.send(FrameType::cancelled, FieldWriter().number(uint64_t(code)).text(why_).payload());
}

void RendezvousServer::lost(Peer& peer, const std::string& how) {
  if (!peer.known || peer.leaving) return;
  const std::string why = "rank " + std::to_string(peer.rank()) + " is gone (" + how + ")";
  if (complete_)
    failed(why, peer.rank());
  else
    cancel(why + " before all ranks had come.", ExitCode::failed);
}

void RendezvousServer::failed(const std::string& why, int from) {
  if (failed_) return;
  failed_ = true;
  why_ = why;
  rounds_.clear();
  const Packed frame = pack(FrameType::failed, why);
  for (Peer* peer : by_rank_)
    if (peer && peer->open() && peer->rank() != from) peer->send(frame);
}

// The text that others wait for will not come.
void RendezvousServer::has_left(int rank) {
  failed("rank " + std::to_string(rank) + " has ended while others wait for it", rank);
}

}  // namespace strata
