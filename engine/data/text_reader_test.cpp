// Pieces of text: nothing is lost or split inside a character, and what is no UTF-8 is found at its byte.
#include "engine/data/text_reader.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "engine/data/testing.h"

namespace strata::text_reader_test {
namespace {

constexpr int64_t kPiece = TextReader::kPiece;

std::vector<std::string> pieces(const std::string& path, int64_t begin, int64_t end) {
  TextReader reader(path, begin, end);
  std::vector<std::string> result;
  for (std::string piece; reader.next(piece);) {
    EXPECT_LE(int64_t(piece.size()), kPiece);
    result.push_back(piece);
  }
  EXPECT_EQ(reader.position(), end);
  return result;
}

std::string joined(const std::vector<std::string>& pieces) {
  std::string text;
  for (const std::string& piece : pieces) text += piece;
  return text;
}

TEST(TextReader, PiecesEndWithLinesAndTogetherAreTheText) {
  const TestFolder folder;
  std::string text;
  for (int line = 0; text.size() < 3'000'000; ++line) text += "line " + std::to_string(line) + "\n";
  text += "no line end";
  const std::string path = folder.write("t.txt", text);
  const std::vector<std::string> found = pieces(path, 0, int64_t(text.size()));
  EXPECT_EQ(joined(found), text);
  ASSERT_EQ(found.size(), 3u);
  for (size_t i = 0; i + 1 < found.size(); ++i) EXPECT_EQ(found[i].back(), '\n');
  EXPECT_EQ(joined(pieces(path, 7, 100)), text.substr(7, 93));
  EXPECT_TRUE(pieces(path, 5, 5).empty());
}

TEST(TextReader, TextWithoutLinesIsCutBetweenCharacters) {
  const TestFolder folder;
  // Characters of 1 to 4 bytes, at each of four offsets from the border of a piece.
  for (const std::string character : {"x", "é", "€", "😀"})
    for (size_t shift = 0; shift < 4; ++shift) {
      std::string text(shift, 'a');
      while (int64_t(text.size()) < kPiece + 100) text += character;
      const std::string path = folder.write("t.txt", text);
      const std::vector<std::string> found = pieces(path, 0, int64_t(text.size()));
      ASSERT_EQ(found.size(), 2u);
      EXPECT_EQ(joined(found), text);
      EXPECT_GT(int64_t(found[0].size()), kPiece - 4);
      for (const std::string& piece : found) EXPECT_EQ(first_invalid_utf8(piece), std::string::npos);
    }
}

TEST(TextReader, BytesThatAreNoTextPassWhole) {
  const TestFolder folder;
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (const int only : {-1, 0x80, 0xF4, 0xFF}) {  // -1: any byte but line ends
    std::string text(2'500'000, '\0');
    for (char& byte : text) byte = char(only < 0 ? 11 + random() % 245 : uint64_t(only));
    const std::string path = folder.write("t.txt", text);
    EXPECT_TRUE(joined(pieces(path, 0, int64_t(text.size()))) == text);
  }
}

TEST(TextReader, MissingAndShrunkFilesAreErrors) {
  const TestFolder folder;
  EXPECT_EQ(error_of(folder, [&] { TextReader(folder / "none", 0, 1); }),
            "none: cannot read it: No such file or directory.");
  const std::string path = folder.write("t.txt", "abc");
  std::string piece;
  EXPECT_EQ(error_of(folder, [&] { TextReader(path, 0, 4).next(piece); }),
            "t.txt: became shorter while it was read; try again when nothing writes to it.");
  EXPECT_EQ(error_of(folder, [&] { text_size(folder / "none"); }), "none: cannot read it: No such file or directory.");
  EXPECT_EQ(error_of(folder, [&] { text_size(folder / "."); }), ".: is not a regular file.");
  EXPECT_EQ(text_size(path), 3);
}

TEST(CutPosition, IsAfterALineEndOrBeforeACharacter) {
  const TestFolder folder;
  const auto cut = [&](const std::string& text, double fraction) {
    return cut_position(folder.write("t.txt", text), int64_t(text.size()), fraction);
  };
  EXPECT_EQ(cut("aaaa\nbbbb\ncccc\n", 0.5), 10);  // from byte 8, the next line
  EXPECT_EQ(cut("aaaa\nbbbb\ncccc\n", 0.2), 12);  // no line begins after byte 12: there
  EXPECT_EQ(cut("aaaabbbb", 0.5), 4);
  EXPECT_EQ(cut("a€€", 0.5), 4);   // byte 4 begins a character
  EXPECT_EQ(cut("a€€", 0.34), 7);  // byte 5 is inside one, which ends the text
  EXPECT_EQ(cut("aa\nbb\n", 0.0), 6);
  EXPECT_EQ(cut("aa\nbb\n", 0.99), 3);
  EXPECT_EQ(cut("abc", 0.01), 3);
  // The next line end is more than 64 KiB away.
  EXPECT_EQ(cut(std::string(100'000, 'a') + "\n" + std::string(9, 'b'), 0.9), 10'001);
}

TEST(Utf8, ValidTextPasses) {
  for (const std::string text :
       {"", "abc\n\t", "é", "€", "😀", "\xEF\xBB\xBFx", "\xED\x9F\xBF", "\xEE\x80\x80", "\xF4\x8F\xBF\xBF"})
    EXPECT_EQ(first_invalid_utf8("ab" + text + "c"), std::string::npos) << text;
  EXPECT_EQ(first_invalid_utf8(std::string("a\0b", 3)), std::string::npos);
}

TEST(Utf8, WhatRfc3629ForbidsIsFoundAtItsByte) {
  const std::vector<std::string> wrong{
      "\x80",         "\xC0\x80",         "\xC1\xBF",         "\xC3",         "\xC3(",
      "\xE2\x82",     "\xE2(\xA1",        "\xE0\x9F\xBF",     "\xED\xA0\x80", "\xF0\x8F\xBF\xBF",
      "\xF0\x9F\x98", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF"};
  for (const std::string& bytes : wrong) {
    EXPECT_EQ(first_invalid_utf8("é€" + bytes), 5u) << testing::PrintToString(bytes);
    EXPECT_EQ(first_invalid_utf8("é€" + bytes + "x"), 5u) << testing::PrintToString(bytes);
  }
  const TestFolder folder;
  EXPECT_EQ(
      error_of(folder, [&] { require_utf8("ab\xFF", folder / "t.txt", 1000); }),
      "t.txt: is not UTF-8 text: byte 1002 begins no character. Convert it (iconv -f latin1 -t utf-8, say) or use "
      "--tokenizer bytes.");
}

}  // namespace
}  // namespace strata::text_reader_test
