// Ranks as processes: windows in shared memory between those of one host, libfabric between hosts.
#pragma once
#include <memory>
#include <string>

#include "comm/rendezvous.h"
#include "comm/world.h"

namespace strata {

struct NetworkOptions {
  std::string provider = "auto";  // of libfabric; auto: shared memory within a host, tcp between hosts
  std::string address{};          // of this host for the others; empty: what the way to rank 0 uses
  int direct = 31;                // most ranks of a group over libfabric that all exchange with all at once
  double timeout_seconds = 600;   // the longest wait for another rank in an operation
  double work_seconds = 600;      // … at least, where ranks wait for one that measures or writes a checkpoint
};

// Joins the others (see Rendezvous for errors), while the process has one thread. `local_size` is the number of ranks
// on this host, 0 when unknown.
std::unique_ptr<World> process_world(RendezvousOptions rendezvous, NetworkOptions network, int local_size);

}  // namespace strata
