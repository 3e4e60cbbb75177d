// libFuzzer target for tokenizer.json: whatever the bytes are, reading them either throws Error or gives a tokenizer
// that encodes any text, knows the tokens that it gives, and decodes them. Build with -DSTRATA_FUZZ=ON and clang.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "engine/data/tokenizer_json/tokenizer_json.h"
#include "strata/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const auto tokenizer = strata::parse_tokenizer_json(text, "tokenizer.json");
    for (const std::string_view sample : {std::string_view("ab  it's 12\n\n<s> e\xCC\x81 \xE6\xBC\xA2 \xFF x"), text}) {
      const std::vector<int32_t> ids = tokenizer->encode(sample);
      for (const int32_t id : ids)
        if (!tokenizer->knows(id)) std::abort();
      tokenizer->decode(ids);
    }
  } catch (const strata::Error&) {
  }
  return 0;
}
