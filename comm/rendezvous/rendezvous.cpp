// A server thread on rank 0 and a client on every rank; see comm/rendezvous.h.
#include "comm/rendezvous.h"

#include "comm/rendezvous/client.h"
#include "comm/rendezvous/server.h"

namespace strata {

Rendezvous::Rendezvous(RendezvousOptions options, std::function<void(const std::string&)> ended) {
  if (options.secret.empty()) options.secret = options.token;
  if (options.rank == 0) server_ = std::make_unique<RendezvousServer>(options);
  client_ = std::make_unique<RendezvousClient>(options, std::move(ended));
}
Rendezvous::~Rendezvous() {
  client_.reset();
  server_.reset();
}
std::vector<std::string> Rendezvous::collect(const std::string& key, const std::vector<int>& members,
                                             const std::string& text, Answer answer, double seconds) {
  return client_->collect(key, members, text, answer, seconds);
}
std::vector<int> Rendezvous::missing(double seconds) { return client_->missing(seconds); }
std::string Rendezvous::local_address() const { return client_->local_address(); }
void Rendezvous::fail(const std::string& why) { client_->fail(why); }

}  // namespace strata
