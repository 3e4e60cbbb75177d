// Loads the library with what knows libfabric, beside this one; see fabric.h.
#include <dlfcn.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <mutex>

#include "comm/fabric.h"
#include "strata/error.h"
#include "strata/fingerprint.h"

namespace strata {
namespace {

// PSM, under libfabric, prints backtraces of its own from handlers that it installs when it is loaded.
class KeptHandlers {
 public:
  KeptHandlers() {
    for (size_t s = 0; s < kCount; ++s) sigaction(kSignals[s], nullptr, &handlers_[s]);
  }
  ~KeptHandlers() {
    for (size_t s = 0; s < kCount; ++s) sigaction(kSignals[s], &handlers_[s], nullptr);
  }
  KeptHandlers(const KeptHandlers&) = delete;

 private:
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGINT, SIGTERM};
  static constexpr size_t kCount = std::size(kSignals);
  struct sigaction handlers_[kCount];
};

const FabricLibrary& fabric_library() {
  static std::mutex mutex;
  static const FabricLibrary* library = nullptr;
  const std::lock_guard lock(mutex);
  if (library) return *library;
  Dl_info here{};
  dladdr(reinterpret_cast<void*>(&fabric_communicator), &here);
  const std::string path = std::filesystem::path(here.dli_fname).parent_path() / "strata" / "fabric.so";
  const KeptHandlers kept;
  void* const loaded = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // never unloaded: groups of it may live on
  if (!loaded) throw Error(path + ": the system's loader refuses it: " + dlerror() + ".");
  const auto entry = reinterpret_cast<const FabricLibrary* (*)()>(dlsym(loaded, "strata_fabric_v1"));
  if (!entry || std::string(entry()->fingerprint) != STRATA_FINGERPRINT)
    throw Error(path + ": was built with another Strata; build both together.");
  library = entry();
  return *library;
}

}  // namespace

// Chunks of a MiB are sent without them, and no more than 4 messages of a pair of ranks are ever on their way.
void limit_fabric_buffers() { setenv("FI_OFI_RXM_MSG_RX_SIZE", "64", 0); }

std::unique_ptr<Communicator> fabric_communicator(FabricOptions options, int rank, Rendezvous& meeting,
                                                  const std::string& key, const AbortFlag& abort) {
  return fabric_library().open(std::move(options), rank, meeting, key, abort);
}

}  // namespace strata
