// How both sides of a new connection show that they know the job's secret without sending it: each answers the other's
// random nonce with HMAC-SHA-256 (RFC 2104; libsodium) over the direction, both nonces, and who claims to be what. It
// tells who is there; it does not hide or sign what follows.
#pragma once
#include <cstdint>
#include <string>

namespace strata {

enum class Side { rank, zero };  // whose proof it is; so that no proof can be sent back as an answer to itself

struct Claim {
  std::string rank_nonce, zero_nonce;
  uint64_t rank = 0, size = 1;
  std::string version, job;
};

std::string make_nonce();  // 32 bytes, never the same
std::string prove(const std::string& secret, Side side, const Claim& claim);
bool proves(const std::string& secret, Side side, const Claim& claim, std::string_view proof);

}  // namespace strata
