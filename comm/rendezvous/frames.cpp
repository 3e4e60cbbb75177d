// See frames.h. Numbers travel as they lie in memory: ranks of one job run on one kind of machine.
#include "comm/rendezvous/frames.h"

#include <algorithm>
#include <cstring>

namespace strata {
namespace {

constexpr uint32_t kMark = 0x41525453;  // "STRA"

struct Head {
  uint32_t mark, type;
  uint64_t bytes;
};

}  // namespace

bool FrameReader::add(std::string_view bytes) {
  while (!bytes.empty() && !broken_) {
    if (!in_payload_) {
      const size_t taken = std::min(bytes.size(), sizeof(Head) - head_.size());
      head_.append(bytes.substr(0, taken));
      bytes.remove_prefix(taken);
      if (head_.size() < sizeof(Head)) return true;
      Head head;
      std::memcpy(&head, head_.data(), sizeof head);
      head_.clear();
      broken_ = head.mark != kMark || head.type < 1 || head.type > kFrameTypes || head.bytes > largest_;
      type_ = FrameType(head.type);
      left_ = head.bytes;
      in_payload_ = true;
    } else {
      const size_t taken = size_t(std::min<uint64_t>(bytes.size(), left_));
      payload_.append(bytes.substr(0, taken));
      bytes.remove_prefix(taken);
      left_ -= taken;
    }
    if (left_ > 0 || broken_) continue;
    whole_.push_back({type_, std::move(payload_)});
    payload_.clear();
    in_payload_ = false;
  }
  return !broken_;
}

bool FrameReader::next(Frame& frame) {
  if (whole_.empty()) return false;
  frame = std::move(whole_.front());
  whole_.pop_front();
  return true;
}

FieldWriter& FieldWriter::number(uint64_t value) {
  payload_.append(reinterpret_cast<const char*>(&value), sizeof value);
  return *this;
}

FieldWriter& FieldWriter::text(std::string_view value) {
  number(value.size());
  payload_.append(value);
  return *this;
}

uint64_t FieldReader::number() {
  uint64_t value = 0;
  good_ = good_ && rest_.size() >= sizeof value;
  if (!good_) return 0;
  std::memcpy(&value, rest_.data(), sizeof value);
  rest_.remove_prefix(sizeof value);
  return value;
}

std::string_view FieldReader::text() {
  const uint64_t bytes = number();
  good_ = good_ && bytes <= rest_.size();
  if (!good_) return {};
  const std::string_view value = rest_.substr(0, size_t(bytes));
  rest_.remove_prefix(size_t(bytes));
  return value;
}

Packed pack(FrameType type, std::string_view payload) {
  const Head head{kMark, uint32_t(type), payload.size()};
  auto frame = std::make_shared<std::string>();
  frame->reserve(sizeof head + payload.size());
  frame->append(reinterpret_cast<const char*>(&head), sizeof head).append(payload);
  return frame;
}

}  // namespace strata
