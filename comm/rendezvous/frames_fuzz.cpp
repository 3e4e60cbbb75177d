// Any bytes, in any pieces, are frames or are refused; what a stranger sends is never kept beyond its limit.
#include <algorithm>
#include <cstdlib>

#include "comm/rendezvous/frames.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const size_t piece = 1 + data[0];
  strata::FrameReader reader(data[1] & 1 ? strata::kStrangersFrame : UINT64_MAX);
  std::string_view bytes(reinterpret_cast<const char*>(data) + 2, size - 2);
  for (bool right = true; right && !bytes.empty();) {
    right = reader.add(bytes.substr(0, piece));
    bytes.remove_prefix(std::min(piece, bytes.size()));
    for (strata::Frame frame; reader.next(frame);) {
      if ((data[1] & 1) && frame.payload.size() > strata::kStrangersFrame) std::abort();
      strata::FieldReader fields(frame.payload);
      for (int i = 0; i < 4; ++i) {
        fields.number();
        if (fields.text().size() > frame.payload.size()) std::abort();
      }
      (void)fields.complete();
    }
  }
  return 0;
}
