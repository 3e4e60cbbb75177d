// How the processes of a run find each other and notice when one is gone: a TCP connection of each rank to rank 0,
// which keeps texts by key and passes on who failed. Small and rare things only; data goes elsewhere.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "strata/error.h"

namespace strata {

struct RendezvousOptions {
  int rank = 0, size = 1;
  std::string address = "127.0.0.1";  // of rank 0
  int port = 0;
  std::string token;            // of the job: a process with another one is turned away
  std::string version;          // must be the same on all ranks
  int listening = -1;           // rank 0: a socket that listens already; -1: bind address and port
  double join_seconds = 60;     // until all ranks must have come
  double silence_seconds = 30;  // without a sign of life a rank counts as gone
};

// The job could not begin: a rank is missing, or runs another version. All ranks get it, and rank 0 tells.
struct JobCancelled : Error {
  using Error::Error;
};

class Rendezvous {
 public:
  // Joins and waits until all ranks have. Throws Error (usage): port taken, address unknown or not reachable, ranks
  // missing after join_seconds (named), another token, size or version. `ended` is called once, from a thread of the
  // rendezvous, when a rank failed or is gone, with a sentence that names it.
  Rendezvous(RendezvousOptions options, std::function<void(const std::string&)> ended);
  ~Rendezvous();  // says goodbye; rank 0 waits until all others have, or are gone
  Rendezvous(const Rendezvous&) = delete;

  void put(const std::string& key, const std::string& value);
  std::string get(const std::string& key);  // waits until somebody has put it; throws Error (failed) when a rank ends
  bool await(const std::string& key, double seconds);  // whether somebody has put it by then; before get
  std::string local_address() const;                   // of this host, on the way to rank 0
  void fail(const std::string& why);                   // tells all others; from any thread

 private:
  class Server;
  class Client;
  std::unique_ptr<Server> server_;
  std::unique_ptr<Client> client_;
};

}  // namespace strata
