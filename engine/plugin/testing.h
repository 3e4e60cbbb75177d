// For tests of messages: the whole text of the Error that a call throws.
#pragma once
#include <string>

#include "strata/error.h"

namespace strata::test {

template <class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "(no error)";
}

}  // namespace strata::test
