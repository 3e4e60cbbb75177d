// Calls into plugins while planning: what a hook throws is reported with the plugin's name.
#pragma once
#include <new>
#include <string>
#include <string_view>

#include "engine/plugin/order.h"

namespace strata {

// Runs one planning hook of one plugin.
template <class Call>
void guarded(const NamedPlugin& named, std::string_view stage, Call&& call) {
  const std::string where = "plugin \"" + named.name + "\", stage " + std::string(stage) + ": ";
  try {
    call(*named.plugin);
  } catch (const Error& error) {
    throw Error(where + error.what(), error.code());
  } catch (const std::bad_alloc&) {
    throw Error(where + "out of memory.", ExitCode::failed);
  } catch (const std::exception& error) {
    throw Error(where + "threw \"" + error.what() + "\".", ExitCode::failed);
  } catch (...) {
    throw Error(where + "threw something that is not an exception.", ExitCode::failed);
  }
}

}  // namespace strata
