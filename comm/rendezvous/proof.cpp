// See proof.h. Fields are written with their lengths, so that no two claims are one sequence of bytes.
#include "comm/rendezvous/proof.h"

#include <sodium.h>

#include "comm/rendezvous/frames.h"
#include "strata/error.h"

namespace strata {
namespace {

void start_library() {
  static const bool ready = sodium_init() >= 0;
  STRATA_CHECK(ready);
}

}  // namespace

std::string make_nonce() {
  start_library();
  std::string nonce(32, 0);
  randombytes_buf(nonce.data(), nonce.size());
  return nonce;
}

std::string prove(const std::string& secret, Side side, const Claim& claim) {
  start_library();
  const std::string message = FieldWriter()
                                  .text(side == Side::rank ? "strata rendezvous: a rank" : "strata rendezvous: rank 0")
                                  .text(claim.rank_nonce)
                                  .text(claim.zero_nonce)
                                  .number(claim.rank)
                                  .number(claim.size)
                                  .text(claim.version)
                                  .text(claim.job)
                                  .payload();
  std::string proof(crypto_auth_hmacsha256_BYTES, 0);
  auto* out = reinterpret_cast<unsigned char*>(proof.data());
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, reinterpret_cast<const unsigned char*>(secret.data()), secret.size());
  crypto_auth_hmacsha256_update(&state, reinterpret_cast<const unsigned char*>(message.data()), message.size());
  crypto_auth_hmacsha256_final(&state, out);
  return proof;
}

bool proves(const std::string& secret, Side side, const Claim& claim, std::string_view proof) {
  const std::string right = prove(secret, side, claim);
  return proof.size() == right.size() && sodium_memcmp(proof.data(), right.data(), right.size()) == 0;
}

}  // namespace strata
