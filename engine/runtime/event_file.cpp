// Protocol buffers' wire format by hand: four field types of two messages; see event_file.h.
#include "engine/runtime/event_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <bit>
#include <boost/crc.hpp>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "strata/error.h"

namespace strata {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are written as they lie in memory");

void put(std::string& out, const auto& number) { out.append(reinterpret_cast<const char*>(&number), sizeof number); }

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 128; value >>= 7) out += char(value | 128);
  out += char(value);
}
enum class WireType : uint64_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };
void put_key(std::string& out, uint64_t field, WireType wire) { put_varint(out, field << 3 | uint64_t(wire)); }
void put_bytes(std::string& out, uint64_t field, const std::string& bytes) {
  put_key(out, field, WireType::bytes);
  put_varint(out, bytes.size());
  out += bytes;
}

// Fields of Event: wall_time 1, step 2, file_version 3, summary 5, session_log 7.
std::string event(int64_t step) {
  std::string out;
  put_key(out, 1, WireType::fixed64);
  put(out, std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count());
  put_key(out, 2, WireType::varint);
  put_varint(out, uint64_t(step));
  return out;
}

// Summary is repeated Value (1): tag 1, simple_value 2.
std::string scalar(const std::string& tag, double value) {
  std::string out, summary;
  put_bytes(out, 1, tag);
  put_key(out, 2, WireType::fixed32);
  put(out, float(value));
  put_bytes(summary, 1, out);
  return summary;
}

uint32_t masked_crc(const std::string& bytes) {
  boost::crc_optimal<32, 0x1edc6f41, 0xffffffff, 0xffffffff, true, true> castagnoli;
  castagnoli.process_bytes(bytes.data(), bytes.size());
  return std::rotr(uint32_t(castagnoli.checksum()), 15) + 0xa282ead8;
}

}  // namespace

EventFile::EventFile(const std::string& folder, int64_t last_step) {
  std::error_code problem;
  std::filesystem::create_directories(folder, problem);
  char host[256] = "host";
  gethostname(host, sizeof host - 1);
  const int64_t now = std::chrono::system_clock::now().time_since_epoch() / std::chrono::seconds(1);
  for (int number = 0; file_ < 0 && number < 1000; ++number) {  // read in the order of their names
    path_ = fmt::format("{}/events.out.tfevents.{:010}.{}.{}.{}", folder, now, host, getpid(), number);
    file_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file_ < 0 && errno != EEXIST) break;
  }
  if (file_ < 0) throw Error(path_ + ": cannot write events for TensorBoard: " + std::strerror(errno) + ".");
  std::string version = event(0), start = event(last_step + 1), status;
  put_bytes(version, 3, "brain.Event:2");
  put_key(status, 1, WireType::varint);
  put_varint(status, 1);  // START
  put_bytes(start, 7, status);
  if (!append(version) || !append(start)) ++lost_;
}

EventFile::~EventFile() { close(file_); }

bool EventFile::append(const std::string& event) {
  std::string length, record;
  put(length, uint64_t(event.size()));
  record = length;
  put(record, masked_crc(length));
  record += event;
  put(record, masked_crc(event));
  errno = 0;
  if (pwrite(file_, record.data(), record.size(), end_) == ssize_t(record.size())) {
    end_ += int64_t(record.size());
    return true;
  }
  (void)!ftruncate(file_, end_);
  return false;
}

std::string EventFile::write(int64_t step, const StepLog::Fields& fields) {
  std::string summary;
  for (const auto& [name, value] : fields)
    if (name != "step" && std::isfinite(value)) summary += scalar(name, value);
  std::string out = event(step);
  put_bytes(out, 5, summary);
  if (append(out) || ++lost_ > 1) return "";
  return fmt::format("{}: cannot write events for TensorBoard: {}. The run goes on without them until this is mended.",
                     path_, errno ? std::strerror(errno) : "No space left on device");
}

}  // namespace strata
