// What goes over a connection of the rendezvous: frames (a mark, a type, a length, that many bytes), and numbers and
// texts in them. Knows no sockets; whatever bytes come, nothing here does more than refuse them (frames_fuzz.cpp).
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>

namespace strata {

enum class FrameType : uint32_t {
  hello = 1,  // rank to rank 0: protocol, rank, nonce
  challenge,  // back: nonce
  proof,      // rank to rank 0: proof, size, version
  accepted,   // back: proof
  refused,    // instead of challenge or accepted: a JoinRefusal
  welcome,    // all have come
  cancelled,  // the job cannot begin: exit code, why
  collect,    // rank to rank 0: see Rendezvous::collect
  texts,      // its answer
  late,       // its answer, when some did not come in time: who
  waiting,    // rank to rank 0: see Rendezvous::missing
  missing,    // its answer
  alive,      // a sign of life, either way
  failed,     // either way: why
  goodbye,    // rank to rank 0: this connection will close, and nothing is wrong
};
constexpr uint32_t kFrameTypes = uint32_t(FrameType::goodbye);
constexpr uint64_t kStrangersFrame = 4096;  // bytes, of who has proved nothing yet

struct Frame {
  FrameType type{};
  std::string payload;
};

// Bytes to frames, as they come.
class FrameReader {
 public:
  explicit FrameReader(uint64_t largest = kStrangersFrame) : largest_(largest) {}
  void allow_any_size() { largest_ = UINT64_MAX; }
  // False when this is no frame, or one that is too long: then nothing more is taken.
  bool add(std::string_view bytes);
  bool next(Frame& frame);  // a whole one, if there is

 private:
  uint64_t largest_;
  std::string head_, payload_;
  FrameType type_{};
  uint64_t left_ = 0;  // of the payload
  bool in_payload_ = false, broken_ = false;
  std::deque<Frame> whole_;
};

// The payload of a frame, field by field.
class FieldWriter {
 public:
  FieldWriter& number(uint64_t value);
  FieldWriter& text(std::string_view value);
  std::string payload() { return std::move(payload_); }

 private:
  std::string payload_;
};

class FieldReader {
 public:
  explicit FieldReader(std::string_view payload) : rest_(payload) {}
  uint64_t number();                                        // 0 when there is none
  std::string_view text();                                  // empty when there is none
  bool complete() const { return good_ && rest_.empty(); }  // every field was there, and nothing else

 private:
  std::string_view rest_;
  bool good_ = true;
};

// A frame as it goes over the wire; shared by all connections that it goes to.
using Packed = std::shared_ptr<const std::string>;
Packed pack(FrameType type, std::string_view payload = {});

}  // namespace strata
