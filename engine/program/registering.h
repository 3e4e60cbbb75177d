// Whose kinds and schedules are registered: while one of these lives, register_kind and register_schedule on this
// thread are called by that plugin, which may be made any number of times. For the loader.
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

const std::string& registering_plugin();           // on this thread; empty: none
std::string owner_of_kind(std::string_view name);  // the plugin that registered it; empty: the engine

}  // namespace strata
