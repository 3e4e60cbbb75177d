// Rank 0's side of the rendezvous: one thread, one poll, nothing that waits for a single connection.
#pragma once
#include <atomic>
#include <list>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "comm/rendezvous.h"
#include "comm/rendezvous/connection.h"
#include "comm/rendezvous/proof.h"

namespace strata {

// Why a connection is refused; known to both sides, so that no words of strangers are shown.
enum class JoinRefusal : uint64_t { another_job = 1, other_protocol, rank_taken };
inline constexpr const char* kProtocol = "strata rendezvous 2";

// How messages of both sides name a time limit and the place of the rendezvous.
inline std::string limit_text(double seconds) { return std::to_string(int(seconds)) + " s"; }
inline std::string place_of(const RendezvousOptions& o) { return o.address + ":" + std::to_string(o.port); }

class RendezvousServer {
 public:
  explicit RendezvousServer(const RendezvousOptions& options);  // listens; Error (usage) when it cannot
  // Waits until all ranks have said goodbye or are gone, for a limited time.
  ~RendezvousServer();

 private:
  // A connection; until `known` it is a stranger's.
  struct Peer : Connection {
    using Connection::Connection;
    bool known = false, leaving = false;
    Claim claim;
    double since = seconds_now(), told = seconds_now();
    int rank() const { return int(claim.rank); }
  };
  // Texts of one `collect`, until all members have come.
  struct Round {
    std::vector<std::string> texts;
    std::vector<bool> came;
    size_t count = 0;
    double until = 0;                             // 0: no limit
    std::vector<std::pair<int, Answer>> waiting;  // ranks
  };
  struct Inquiry {  // of a rank that waited for too long
    int rank;
    uint64_t number;
    double until;
  };

  void run();
  void serve();
  bool may_close();
  void forgive(double seconds);
  bool hear(Peer& peer);
  void end(Peer& peer);
  void accept_some();
  void drop_oldest_stranger();
  void look_after(Peer& peer, double now);
  void look_after_rounds(double now);

  void take(Peer& peer, const Frame& frame);
  void greet(Peer& peer, const Frame& frame);
  void admit(Peer& peer, const Frame& frame);
  void refuse(Peer& peer, JoinRefusal why);
  void collect(Peer& peer, const Frame& frame);
  void answer(const std::string& key, Round& round);
  void answer(const Inquiry& inquiry);
  void damaged(Peer& peer);

  Peer* of_rank(int rank);
  void missing_ranks();
  void cancel(const std::string& why, ExitCode code);
  void failed(const std::string& why, int from);
  void lost(Peer& peer, const std::string& how);
  void has_left(int rank);

  const RendezvousOptions options_;
  int listening_ = -1, wake_ = -1;
  size_t most_strangers_ = 0;
  std::list<Peer> peers_;
  std::vector<Peer*> by_rank_;
  std::vector<bool> came_, left_, waited_;  // ever, by rank
  std::map<std::string, Round> rounds_;
  std::vector<Inquiry> inquiries_;
  double began_ = seconds_now(), leave_by_ = 0, deaf_until_ = 0;
  bool complete_ = false, failed_ = false;
  ExitCode code_ = ExitCode::usage;
  std::string why_;
  std::atomic<bool> closing_{false};
  std::thread thread_;
};

}  // namespace strata
