// See connection.h.
#include "comm/rendezvous/connection.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

namespace strata {

bool Connection::flush() {
  while (!out_.empty()) {
    const std::string& frame = *out_.front();
    const ssize_t n = ::send(socket_, frame.data() + sent_, frame.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    sent_ += size_t(n);
    if (sent_ < frame.size()) continue;
    out_.pop_front();
    sent_ = 0;
  }
  return true;
}

bool Connection::fill() {
  char buffer[64 << 10];
  const size_t most = trusted_ ? sizeof buffer : size_t(kStrangersFrame);
  for (int reads = trusted_ ? 16 : 1; reads > 0; --reads) {
    const ssize_t n = ::recv(socket_, buffer, most, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    if (n == 0) return false;
    heard = seconds_now();
    if (!reader_.add({buffer, size_t(n)})) return false;
  }
  return true;
}

bool Connection::exchange() {
  const bool takes = flush(), gives = fill();
  return takes && gives;
}

void Connection::close() {
  if (socket_ >= 0) ::close(socket_);
  socket_ = -1;
}

}  // namespace strata
