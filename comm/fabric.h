// A group of ranks over libfabric: any provider with reliable datagrams and tags (tcp, shm, verbs, efa). The code that
// knows libfabric is a library of its own (fabric.cpp, lib/strata/fabric.so), loaded with the first such group: merely
// to be loaded, what is under libfabric takes 0.2 s and installs signal handlers.
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
// no such provider, naming those there are. Signals keep the handlers that they have.
std::unique_ptr<Communicator> fabric_communicator(FabricOptions options, int rank, Rendezvous& meeting,
                                                  const std::string& key, const AbortFlag& abort);

// Has libfabric keep 64 buffers of 16 KiB for each connection instead of thousands, unless its variable of the
// environment says how many. To be called before the process has threads.
void limit_fabric_buffers();

// What the library hands out by the function strata_fabric_v1.
struct FabricLibrary {
  const char* fingerprint;  // of the Strata that it was built with
  std::unique_ptr<Communicator> (*open)(FabricOptions options, int rank, Rendezvous& meeting, const std::string& key,
                                        const AbortFlag& abort);
};

}  // namespace strata
