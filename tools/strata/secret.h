// The secret by which the ranks of a job know each other (comm/rendezvous.h): from the environment, or kept for the
// user.
#pragma once
#include <string>

namespace strata {

// 64 random hexadecimal digits.
std::string make_secret();

// STRATA_SECRET, or what is in the file STRATA_SECRET_FILE. Where neither is set and all ranks are on one host, the one
// in the user's cache folder, which is made when it is not there: other users of the host cannot read it. Empty where
// there is none; `note` says so then. Throws Error when both are set, or a secret is short, not to be read or readable
// by others.
std::string shared_secret(bool one_host, std::string& note);

}  // namespace strata
