// Whose kinds are registered: while one of these lives, register_kind on this thread is called by that plugin, which may
// be made any number of times. For the loader.
#pragma once
#include <string>
#include <string_view>

namespace strata {

class RegisteringPlugin {
 public:
  explicit RegisteringPlugin(std::string_view name);
  ~RegisteringPlugin();
  RegisteringPlugin(const RegisteringPlugin&) = delete;
  RegisteringPlugin& operator=(const RegisteringPlugin&) = delete;

 private:
  std::string before_;
};

}  // namespace strata
