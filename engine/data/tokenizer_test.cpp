// Tokenizers give the text back, train reproducibly, and say what is wrong with a model or a size.
#include "engine/data/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "engine/data/prepare.h"
#include "engine/data/testing.h"
#include "engine/data/token_file.h"

namespace strata::tokenizer_test {
namespace {

// Text with numbers, several spaces, tabs, blank lines and characters of all lengths; enough for some hundred pieces.
std::string corpus(int lines) {
  std::string text;
  for (int line = 0; line < lines; ++line)
    text +=
        "Line " + std::to_string(line * 7919 % 1000) + "  of the naïve text,\tand the quick brown fox costs 5 € 😀\n\n";
  return text;
}

class SentencePiece : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TestFolder;
    folder_->write("t.txt", corpus(500));
    folder_->write("tokenizer.model", train_sentencepiece({*folder_ / "t.txt"}, 400));
  }
  static void TearDownTestSuite() { delete folder_; }
  static const TestFolder& folder() { return *folder_; }

 private:
  static TestFolder* folder_;
};
TestFolder* SentencePiece::folder_ = nullptr;

TEST(ByteTokenizer, EveryByteIsItsId) {
  std::string text;
  for (int byte = 0; byte < 256; ++byte) text += char(byte);
  const auto tokenizer = byte_tokenizer();
  const std::vector<int32_t> ids = tokenizer->encode(text);
  for (int byte = 0; byte < 256; ++byte) EXPECT_EQ(ids[size_t(byte)], byte);
  EXPECT_EQ(tokenizer->decode(ids), text);
  EXPECT_EQ(tokenizer->vocabulary(), 256);
  const TestFolder folder;
  for (const int32_t id : {-1, 256})
    EXPECT_EQ(error_of(folder,
                       [&] {
                         tokenizer->decode({65, id});
                       }),
              "token " + std::to_string(id) + " is no byte; the tokens are not of the tokenizer \"bytes\".");
}

TEST_F(SentencePiece, DecodingGivesTheVeryTextBack) {
  const auto tokenizer = load_tokenizer(folder().path());
  EXPECT_EQ(tokenizer->vocabulary(), 400);
  const std::string known = corpus(3);
  const std::vector<int32_t> ids = tokenizer->encode(known);
  EXPECT_EQ(tokenizer->decode(ids), known);
  EXPECT_LT(ids.size(), known.size() / 2) << "pieces of the training text are longer than two bytes";
  EXPECT_TRUE(std::all_of(ids.begin(), ids.end(), [](int32_t id) { return id >= 0 && id < 400; }));
  for (const std::string text : {"", " ", "\n", "  a  \n\n b\r\n\tc  ", "漢字かな ŁódźЖ", "x"})
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
}

TEST_F(SentencePiece, TextEncodedInPartsIsTheTextEncoded) {
  const auto tokenizer = load_tokenizer(folder().path());
  const std::string first = corpus(2), second = corpus(1);
  std::vector<int32_t> ids = tokenizer->encode(first);
  const std::vector<int32_t> more = tokenizer->encode(second);
  ids.insert(ids.end(), more.begin(), more.end());
  EXPECT_EQ(tokenizer->decode(ids), first + second);  // nothing between them, as a mark at each part's start would be
}

TEST_F(SentencePiece, LongTextsHaveTheTokensOfTheirLines) {
  const auto tokenizer = load_tokenizer(folder().path());
  // Encoded in parts inside; the parts must not show. A text below 4 KiB is encoded at once.
  for (const std::string ends : {"\n", "\n\n", "\n\n\n\n", " ", ""}) {
    std::string text;
    std::vector<int32_t> expected;
    for (int i = 0; i < 3000; ++i) {
      const std::string line = "the naïve fox  " + std::to_string(i) + ends;
      const std::vector<int32_t> ids = tokenizer->encode(line);
      text += line;
      expected.insert(expected.end(), ids.begin(), ids.end());
    }
    const std::vector<int32_t> ids = tokenizer->encode(text);
    EXPECT_EQ(tokenizer->decode(ids), text);
    if (ends[0] == '\n') {
      EXPECT_TRUE(ids == expected) << "line ends " << ends.size();
    }
  }
}

TEST_F(SentencePiece, RandomCharactersComeBackByWayOfBytes) {
  const auto tokenizer = load_tokenizer(folder().path());
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 300; ++i) {
    std::string text;
    for (int n = int(random() % 20); n > 0; --n) {
      const uint32_t c = 1 + uint32_t(random() % (n % 3 == 0 ? 0xD7FE : n % 3 == 1 ? 0x7E : 0x7FE));
      if (c == 0x2581) continue;  // SentencePiece's mark for a space
      if (c < 0x80)
        text += char(c);
      else if (c < 0x800)
        text += {char(0xC0 | c >> 6), char(0x80 | (c & 63))};
      else
        text += {char(0xE0 | c >> 12), char(0x80 | (c >> 6 & 63)), char(0x80 | (c & 63))};
    }
    ASSERT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
  }
}

TEST_F(SentencePiece, IdsOutsideTheVocabularyAreErrors) {
  const auto tokenizer = load_tokenizer(folder().path());
  for (const int32_t id : {-1, 400, INT32_MAX})
    EXPECT_EQ(error_of(folder(), [&] { tokenizer->decode({id}); }),
              "token " + std::to_string(id) +
                  " is outside the tokenizer's vocabulary of 400; the tokens are of another tokenizer.");
}

// A model as Llama's are: it puts a space before each text.
TEST_F(SentencePiece, ASpaceBeforeEachTextIsBeforeDocumentsOnly) {
  std::string model = folder().read("tokenizer.model");
  const std::string no_space("\x18\0\x20\0", 4);  // add_dummy_prefix and remove_extra_whitespaces
  const size_t at = model.rfind(no_space);
  ASSERT_NE(at, model.npos);
  model[at + 1] = 1;
  const TestFolder work;
  const auto tokenizer = sentencepiece_tokenizer(work.write("prefix.model", model));
  const auto plain = load_tokenizer(folder().path());
  ASSERT_EQ(tokenizer->encode("and the"), plain->encode(" and the"));
  const std::string text = corpus(40000);
  ASSERT_GT(text.size(), size_t{2 << 20});
  EXPECT_TRUE(tokenizer->encode(text) == plain->encode(" " + text));
  work.write("t.txt", text);
  prepare({.inputs = {work / "t.txt"},
           .output_directory = work / "out",
           .tokenizer = work / "prefix.model",
           .validation_fraction = 0});
  const TokenFile file(work / "out/train_000.bin");
  std::vector<int32_t> ids(size_t(file.tokens()));
  file.read(0, file.tokens(), ids.data());
  EXPECT_TRUE(ids == plain->encode(" " + text));
}

TEST_F(SentencePiece, TheSameTextTrainsTheSameModel) {
  EXPECT_TRUE(train_sentencepiece({folder() / "t.txt"}, 400) == folder().read("tokenizer.model"));
}

TEST_F(SentencePiece, NamesWithCommasAndTextInOneLongLineTrain) {
  std::string text = corpus(500);
  std::replace(text.begin(), text.end(), '\n', ' ');
  const std::string model = train_sentencepiece({folder().write("a,b.txt", text)}, 400);
  folder().write("long.model", model);
  const auto tokenizer = sentencepiece_tokenizer(folder() / "long.model");
  EXPECT_LT(tokenizer->encode(corpus(3)).size(), corpus(3).size() / 2) << "the line was not learned from";
}

TEST_F(SentencePiece, LongLinesAreNotCutInsideCharacters) {
  for (const std::string shift : {"", "a", "aa"}) {
    std::string text = shift;
    const char* const characters[] = {"é", "€", "ж", "漢", "字", "ü", "ß", "か"};
    for (int i = 0; i < 20000; ++i) text += characters[i * i / 7 % 8];
    const std::string model = train_sentencepiece({folder().write("long.txt", text)}, 270);
    EXPECT_EQ(model.find("\xEF\xBF\xBD"), std::string::npos)
        << "the model learned U+FFFD, which the text does not have";
  }
}

TEST_F(SentencePiece, SizesThatCannotBeNameTheSizeThatCan) {
  const auto training = [&](int64_t size) {
    return error_of(folder(), [&] { train_sentencepiece({folder() / "t.txt"}, size); });
  };
  const auto number_after = [](const std::string& text, const std::string& words) {
    const size_t at = text.find(words);
    return at == std::string::npos ? "nothing" : std::to_string(std::atoll(text.c_str() + at + words.size()));
  };
  const std::string low = training(8), least = number_after(low, "three marks take ");
  EXPECT_EQ(low, "SentencePiece cannot train 8 pieces on this text: its characters, all bytes and three marks take " +
                     least + " already; use at least train:" + least + ".");
  EXPECT_EQ(training(std::stol(least)), "no error");
  EXPECT_NE(training(std::stol(least) - 1), "no error");
  const std::string high = training(80000), most = number_after(high, "it has only ");
  EXPECT_EQ(high, "SentencePiece cannot train 80000 pieces on this text: it has only " + most +
                      "; use more text or at most train:" + most + ".");
  EXPECT_EQ(training(std::stol(most)), "no error");
}

TEST_F(SentencePiece, TextThatIsNotUtf8IsNamedWithItsByte) {
  folder().write("bad.txt", corpus(10) + "caf\xE9 au lait\n");
  const std::string byte = std::to_string(corpus(10).size() + 3);
  EXPECT_EQ(error_of(folder(),
                     [&] {
                       train_sentencepiece({folder() / "t.txt", folder() / "bad.txt"}, 400);
                     }),
            "bad.txt: is not UTF-8 text: byte " + byte +
                " begins no character. Convert it (iconv -f latin1 -t utf-8, say) or use "
                "--tokenizer bytes.");
}

TEST_F(SentencePiece, TrainingPrintsNothing) {
  testing::internal::CaptureStderr();
  testing::internal::CaptureStdout();
  train_sentencepiece({folder() / "t.txt"}, 400);
  error_of(folder(), [&] { sentencepiece_tokenizer(folder() / "t.txt"); });
  error_of(folder(), [&] { sentencepiece_tokenizer(folder() / "none.model"); });
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
}

TEST_F(SentencePiece, WhatIsNoModelIsAnError) {
  EXPECT_EQ(error_of(folder(), [&] { sentencepiece_tokenizer(folder() / "none.model"); }),
            "none.model: cannot read it: No such file or directory.");
  const std::string refusal = ": is no SentencePiece model; name a .model file, \"bytes\" or \"train:SIZE\".";
  EXPECT_EQ(error_of(folder(), [&] { sentencepiece_tokenizer(folder() / "t.txt"); }), "t.txt" + refusal);
  const std::string model = folder().read("tokenizer.model");
  for (const size_t size : {size_t{0}, size_t{1}, model.size() / 2, model.size() - 1}) {
    folder().write("cut.model", model.substr(0, size));
    EXPECT_EQ(error_of(folder(), [&] { sentencepiece_tokenizer(folder() / "cut.model"); }), "cut.model" + refusal)
        << size;
  }
}

TEST(LoadTokenizer, FindsBytesAndMissesNothingSilently) {
  const TestFolder folder;
  EXPECT_EQ(error_of(folder, [&] { load_tokenizer(folder.path()); }),
            folder.path() +
                ": holds no tokenizer (tokenizer.json, tokenizer.model, or tokenizer.txt, which strata data prepare "
                "writes); name its folder with --tokenizer.");
  folder.write("tokenizer.txt", "bites\n");
  EXPECT_EQ(error_of(folder, [&] { load_tokenizer(folder.path()); }),
            "tokenizer.txt: is not of strata data prepare, which writes \"bytes\" there.");
  folder.write("tokenizer.txt", "bytes\n");
  EXPECT_EQ(load_tokenizer(folder.path())->vocabulary(), 256);
}

}  // namespace
}  // namespace strata::tokenizer_test
