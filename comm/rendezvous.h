// How the processes of a run find each other and notice when one is gone: a TCP connection of each rank to rank 0,
// which collects texts of all and passes on who failed. Small and rare things only; data goes elsewhere.
// Who connects proves that it knows the job's secret before anything that it says is taken (rendezvous/proof.h).
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "strata/error.h"

namespace strata {

struct RendezvousOptions {
  int rank = 0, size = 1;
  std::string address = "127.0.0.1";  // of rank 0
  int port = 0;
  std::string token;            // of the job: a process with another one is turned away
  std::string secret{};         // what only ranks of the job know; empty: the token
  std::string version;          // must be the same on all ranks
  int listening = -1;           // rank 0: a socket that listens already; -1: bind address and port
  double join_seconds = 60;     // until all ranks must have come
  double silence_seconds = 30;  // without a sign of life a rank counts as gone
  double introduction_seconds = 15;  // that a stranger has to prove who it is
};

// The job could not begin: a rank is missing, ended, or runs another version. All ranks get it, and rank 0 tells.
struct JobCancelled : Error {
  using Error::Error;
};

// What a member of a `collect` gets.
enum class Answer { all, first, none };  // everybody's texts; that of member 0; nothing, and it does not wait

class RendezvousServer;
class RendezvousClient;

class Rendezvous {
 public:
  // Joins and waits until all ranks have. Throws Error (usage): port taken, too few open files allowed, address unknown
  // or not reachable, who listens there does not answer as rank 0 within join_seconds, another token, secret or size;
  // JobCancelled. `ended` is called once, from a thread of the rendezvous, when a rank failed or is gone, with a
  // sentence that names it.
  Rendezvous(RendezvousOptions options, std::function<void(const std::string&)> ended);
  ~Rendezvous();  // says goodbye; rank 0 waits until all others have, or are gone
  Rendezvous(const Rendezvous&) = delete;

  // Every one of `members` (ranks of the world) calls it with the same key, which no other call has at that time; a
  // text may be of any size. Rank 0 keeps texts until all are there. Throws Error (failed) when a rank ends, or when
  // some have not come within `seconds` of the first (0: wait as long as they live), naming them.
  std::vector<std::string> collect(const std::string& key, const std::vector<int>& members, const std::string& text,
                                   Answer answer, double seconds);
  // Ranks that do not call this within `seconds`, or have not ever.
  std::vector<int> missing(double seconds);
  std::string local_address() const;  // of this host, on the way to rank 0
  void fail(const std::string& why);  // tells all others; from any thread

 private:
  std::unique_ptr<RendezvousServer> server_;
  std::unique_ptr<RendezvousClient> client_;
};

}  // namespace strata
