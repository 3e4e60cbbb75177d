// Event files as TensorBoard 2.20 reads them: the format is read back here by its specification, and a file's bytes are
// compared with those that tensorboard.summary wrote for the same scalars.
#include "engine/runtime/event_file.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <vector>

#include "strata/error.h"
#include "tests/harness.h"

namespace strata::event_file_test {
namespace {

// CRC-32C bit by bit, as RFC 3720 defines it.
uint32_t plain_masked_crc(const std::string& bytes) {
  uint32_t crc = 0xffffffff;
  for (unsigned char byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78 : 0);
  }
  crc = ~crc;
  return (crc >> 15 | crc << 17) + 0xa282ead8;
}

template <class Number>
Number number_at(const std::string& bytes, size_t at) {
  Number number;
  std::memcpy(&number, bytes.data() + at, sizeof number);
  return number;
}

std::vector<std::string> records(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  const std::string all = text.str();
  std::vector<std::string> result;
  for (size_t at = 0; at < all.size();) {
    const auto length = number_at<uint64_t>(all, at);
    EXPECT_EQ(number_at<uint32_t>(all, at + 8), plain_masked_crc(all.substr(at, 8)));
    result.push_back(all.substr(at + 12, length));
    EXPECT_EQ(number_at<uint32_t>(all, at + 12 + length), plain_masked_crc(result.back()));
    at += 16 + length;
  }
  return result;
}

// An event behind its time: nine bytes of key and double.
std::string after_time(const std::string& event) {
  EXPECT_EQ(event[0], 9);
  EXPECT_GT(number_at<double>(event, 1), 1.7e9);
  return event.substr(9);
}

TEST(EventFile, HoldsEachStepsScalars) {
  const test::TemporaryFolder folder;
  EventFile file(folder / "a/b", 0);
  EXPECT_EQ(file.write(300, {{"step", 300}, {"loss", 1.5}, {"norm", NAN}, {"s", -2}}), "");
  const auto all = records(file.path());
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(after_time(all[0]), std::string("\x10\x00\x1a\x0d", 4) + "brain.Event:2");
  EXPECT_EQ(after_time(all[1]), std::string("\x10\x01\x3a\x02\x08\x01", 6));
  // step 300; summary of 24 bytes: value of 11 bytes (tag "loss", 1.5), value of 8 bytes (tag "s", -2)
  EXPECT_EQ(after_time(all[2]), std::string("\x10\xac\x02\x2a\x17"
                                            "\x0a\x0b\x0a\x04loss\x15\x00\x00\xc0\x3f"
                                            "\x0a\x08\x0a\x01s\x15\x00\x00\x00\xc0",
                                            28));
}

TEST(EventFile, OfEachStartIsItsOwn) {
  const test::TemporaryFolder folder;
  const EventFile first(folder.path(), 0), second(folder.path(), 7);
  EXPECT_LT(first.path(), second.path());
  EXPECT_EQ(after_time(records(second.path())[1]).substr(0, 2), "\x10\x08");  // what was said of step 8 on is dropped
}

TEST(EventFile, SaysWhereItCannotWrite) {
  const test::TemporaryFolder folder;
  std::ofstream(folder / "file") << "no folder";
  EXPECT_THROW(EventFile(folder / "file", 0), Error);
}

}  // namespace
}  // namespace strata::event_file_test
