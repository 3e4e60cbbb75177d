// Text as it comes is the text that there is at the end, in whole characters.
#include "engine/data/text_stream.h"

#include <gtest/gtest.h>

#include <random>

#include "engine/data/text_reader.h"

namespace strata {
namespace {

TEST(TextStream, HoldsBackCharactersThatAreNotWhole) {
  const auto bytes = byte_tokenizer();
  TextStream stream(*bytes, {'a'});
  std::vector<std::string> told;
  for (const int32_t id : bytes->encode("b\xC3\xA9\xE2\x9C\x93\xF0\x9D\x84\x9E!")) told.push_back(stream.next(id));
  const std::vector<std::string> expected{"b", "", "\xC3\xA9",         "", "", "\xE2\x9C\x93", "",
                                          "",  "", "\xF0\x9D\x84\x9E", "!"};
  EXPECT_EQ(told, expected);
  EXPECT_EQ(stream.next(0xE2), "");
  EXPECT_EQ(stream.rest(), "\xE2") << "what the tokens are, even where it is no text";
  EXPECT_EQ(stream.rest(), "");
}

TEST(TextStream, ShowsUnknownIds) {
  const auto bytes = byte_tokenizer();
  TextStream stream(*bytes, {999});
  EXPECT_EQ(stream.next('a') + stream.next(700) + stream.next('b'), "a<unknown id 700>b");
}

// Any tokens, those among them that make no text: what is told is a prefix of it at any time.
TEST(TextStream, IsTheWholeTextInTheEnd) {
  const std::string folder = STRATA_SOURCE_DIR "/tests/fuzz/tokenizer_json_fuzz/";
  std::vector<std::unique_ptr<Tokenizer>> tokenizers;
  tokenizers.push_back(byte_tokenizer());
  tokenizers.push_back(json_tokenizer(folder + "byte_level.json"));
  for (size_t t = 0; t < tokenizers.size(); ++t)
    for (uint32_t seed = 1; seed <= 50; ++seed) {
      SCOPED_TRACE("tokenizer " + std::to_string(t) + ", seed " + std::to_string(seed));
      std::mt19937 random(seed);
      const Tokenizer& tokenizer = *tokenizers[t];
      std::vector<int32_t> before = tokenizer.encode("so far "),
                           ids = tokenizer.encode("na\xC3\xAFve \xF0\x9F\x92\xA1 text");
      for (int i = 0; i < 40; ++i) ids.push_back(int32_t(random() % uint64_t(tokenizer.vocabulary() + 3)));
      TextStream stream(tokenizer, before);
      std::string told;
      for (const int32_t id : ids) told += stream.next(id);
      EXPECT_EQ(told + stream.rest(), decode_after(tokenizer, before, ids));
    }
}

}  // namespace
}  // namespace strata
