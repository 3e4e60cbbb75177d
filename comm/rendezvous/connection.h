// A socket of the rendezvous: never waits, keeps what is to go and what has come.
#pragma once
#include <deque>
#include <string>

#include "base/clock.h"
#include "comm/rendezvous/frames.h"

namespace strata {

class Connection {
 public:
  double heard = seconds_now();  // when something came last

  explicit Connection(int socket) : socket_(socket) {}
  ~Connection() { close(); }
  Connection(const Connection&) = delete;

  void send(Packed frame) { out_.push_back(std::move(frame)); }
  void send(FrameType type, std::string_view payload = {}) { send(pack(type, payload)); }
  bool sending() const { return !out_.empty(); }
  bool next(Frame& frame) { return reader_.next(frame); }
  // The other side has proved who it is. Until then it costs some KiB at most, whatever it sends.
  void trust() {
    trusted_ = true;
    reader_.allow_any_size();
  }

  // Sends what the socket takes, reads what is there (a share of it, so that others get their turn). False when the
  // other side is gone or sends what is no frame.
  bool flush();
  bool fill();
  // Both: what the other side said before it closed is read even where it takes nothing any more.
  bool exchange();

  bool open() const { return socket_ >= 0; }
  void close();
  int socket() const { return socket_; }

 private:
  int socket_;
  std::deque<Packed> out_;
  size_t sent_ = 0;  // of the first of them
  bool trusted_ = false;
  FrameReader reader_;
};

}  // namespace strata
