// A group of ranks over libfabric: any provider with reliable datagrams and tags (tcp, shm, verbs, efa).
#pragma once
#include <memory>

#include "comm/rendezvous.h"
#include "comm/windows.h"

namespace strata {

struct FabricOptions {
  std::string name;        // of the group, for messages
  std::vector<int> ranks;  // of the world, by rank of the group
  double timeout_seconds = 600;
  std::string provider = "tcp";
  std::string address;  // of this host; empty: what the way to rank 0 uses
  int direct = 31;      // most ranks that all exchange with all at once
  bool rounds_each = false;  // sums of 16 bits are rounded after each addition (reduce.h)
};

// Opens an endpoint and learns the others' addresses through `meeting` under `key`. Throws Error (usage) when there is
// no such provider, naming those there are.
std::unique_ptr<Communicator> fabric_communicator(FabricOptions options, int rank, Rendezvous& meeting,
                                                  const std::string& key, const AbortFlag& abort);

}  // namespace strata
