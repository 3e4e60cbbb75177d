// NVIDIA's libraries are opened when something first needs them: what does not use them needs none of them. The
// emulated device is linked with functions of the same names instead.
#pragma once
#include <dlfcn.h>

#include <string>

#include "strata/error.h"

namespace strata::cuda {

class Library {
 public:
  // Looks where the system does, then in CUDA's folder. `missing` and `old` say what to do where it is not found, or
  // has not what is looked for; both as Error (usage).
  Library(std::string name, [[maybe_unused]] const std::string& missing, std::string old)
      : name_(std::move(name)), old_(std::move(old)) {
#ifndef STRATA_EMULATE
    library_ = dlopen(name_.c_str(), RTLD_NOW | RTLD_LOCAL);
    const std::string reason = library_ ? "" : dlerror();
    if (!library_) library_ = dlopen(("/usr/local/cuda/lib64/" + name_).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library_) throw Error(name_ + " was not found (" + reason + "); " + missing);
#endif
  }
  template <class Function>
  Function find(const char* symbol) const {
    if (void* const found = dlsym(library_, symbol)) return reinterpret_cast<Function>(found);
    throw Error(name_ + " lacks " + symbol + "; " + old_);
  }

 private:
  std::string name_, old_;
  void* library_ = nullptr;
};

#ifdef STRATA_EMULATE
#define STRATA_SYMBOL(library, function) (&function)
#else
#define STRATA_SYMBOL(library, function) (library).find<decltype(&function)>(#function)
#endif

}  // namespace strata::cuda
