// See secret.h.
#include "tools/strata/secret.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "engine/runtime/cache_path.h"
#include "strata/error.h"

namespace strata {
namespace {

constexpr size_t kLeast = 16, kMost = 4096;  // characters

std::string variable_or_empty(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

Error refused(const std::string& what, const std::string& why) {
  return Error(what + " " + why + "; for example: (umask 077; openssl rand -hex 32 >FILE).");
}

// What a file holds that nobody else may read, without the end of its line.
std::string read_private(const std::string& path, const std::string& what) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw refused(what, std::string("cannot be read: ") + std::strerror(errno));
  struct stat status {};
  const bool known = fstat(file, &status) == 0;
  std::string text(kMost + 1, 0);
  const ssize_t size = read(file, text.data(), text.size());
  close(file);
  if (!known || !S_ISREG(status.st_mode) || size < 0 || size_t(size) > kMost)
    throw refused(what, "is not a file of at most 4096 characters");
  if ((status.st_mode & 077) != 0) throw refused(what, "can be read by others; chmod 600 it");
  text.resize(size_t(size));
  while (!text.empty() && std::strchr("\r\n \t", text.back())) text.pop_back();
  if (text.size() < kLeast) throw refused(what, "is shorter than 16 characters, so others could guess it");
  return text;
}

// Makes the file unless another process does at this moment; it appears whole or not at all.
void make_private(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::filesystem::create_directories(folder);
  const std::string own = path + "." + std::to_string(getpid()), text = make_secret() + "\n";
  const int file = open(own.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const bool written = file >= 0 && write(file, text.data(), text.size()) == ssize_t(text.size());
  const bool linked = written && (link(own.c_str(), path.c_str()) == 0 || errno == EEXIST);
  const std::string why = std::strerror(errno);
  if (file >= 0) close(file);
  unlink(own.c_str());
  if (!linked) throw Error(path + ": " + why + ".");
}

}  // namespace

std::string make_secret() {
  unsigned char bytes[32];
  if (getrandom(bytes, sizeof bytes, 0) != ssize_t(sizeof bytes))
    throw Error(std::string("the system gives no random numbers: ") + std::strerror(errno) + ".", ExitCode::failed);
  std::string text;
  for (const unsigned char byte : bytes)
    for (const int digit : {byte >> 4, byte & 15}) text += "0123456789abcdef"[digit];
  return text;
}

std::string shared_secret(bool one_host, std::string& note) {
  const std::string given = variable_or_empty("STRATA_SECRET"), path = variable_or_empty("STRATA_SECRET_FILE");
  if (!given.empty() && !path.empty()) throw Error("STRATA_SECRET and STRATA_SECRET_FILE are both set; set one.");
  if (!given.empty() && given.size() < kLeast)
    throw refused("STRATA_SECRET", "is shorter than 16 characters, so others could guess it");
  if (!given.empty()) return given;
  if (!path.empty()) return read_private(path, "STRATA_SECRET_FILE " + path);
  const std::string advice = "set STRATA_SECRET_FILE for all ranks where other users can reach them";
  if (!one_host) {
    note = "ranks on several hosts know each other by the launcher's variables, which others may guess; " + advice;
    return "";
  }
  const std::string kept = cache_path("secret");
  try {
    if (kept.empty()) throw Error("there is no home folder.");
    if (!std::filesystem::exists(kept)) make_private(kept);
    return read_private(kept, kept);
  } catch (const std::exception& error) {
    note = std::string("no secret for the ranks of this host could be kept (") + error.what() +
           "), so they know each other by the launcher's variables; " + advice;
    return "";
  }
}

}  // namespace strata
