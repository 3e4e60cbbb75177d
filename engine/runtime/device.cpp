// Finds and opens device modules; see strata/device.h.
#include "strata/device.h"

#include <dlfcn.h>

#include <filesystem>
#include <mutex>

#include "strata/error.h"

namespace strata {
namespace {

const DeviceEntry& module_of(const std::string& backend) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  Dl_info here{};
  dladdr(reinterpret_cast<void*>(&open_device), &here);
  const std::filesystem::path folder = std::filesystem::path(here.dli_fname).parent_path() / "strata" / "devices";
  const std::string path = (folder / (backend + ".so")).string();
  if (!std::filesystem::exists(path))
    throw Error("device.backend = \"" + backend + "\", but this Strata was built without it (there is no " + path +
                "); build it where the CUDA toolkit is, or choose \"cpu\".");
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // never unloaded: kernels of it are registered
  if (!library) throw Error(path + ": the system's loader refuses it: " + dlerror() + ".");
  const auto entry = reinterpret_cast<const DeviceEntry* (*)()>(dlsym(library, "strata_device_v1"));
  if (!entry) throw Error(path + ": is no device module of this Strata; build both together.");
  const DeviceEntry& found = *entry();
  if (found.size != sizeof(DeviceEntry) || std::string(found.fingerprint) != STRATA_FINGERPRINT)
    throw Error(path + ": was built with another Strata; build both together.");
  return found;
}

}  // namespace

void load_backend(const std::string& backend) {
  if (is_asynchronous(backend)) module_of(backend);
}

std::unique_ptr<Device> open_device(const std::string& backend, int index, int local_rank) {
  if (!is_asynchronous(backend)) return nullptr;
  return std::unique_ptr<Device>(module_of(backend).create(index, local_rank));
}

}  // namespace strata
