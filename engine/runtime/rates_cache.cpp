// A file under a lock; see rates_cache.h.
#include "engine/runtime/rates_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>
#include <thread>
#include <tuple>

#include "memory/atomic_file.h"
#include "strata/error.h"
#include "strata/json.h"

namespace strata {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kVersion = 4;
constexpr size_t kMostSamples = 48;  // of one kernel

bool nearly(double a, double b) { return std::abs(a - b) <= 0.02 * std::max(a, b); }
bool same(const Tried& a, const Tried& b) {
  return a.name == b.name && nearly(a.flops, b.flops) && nearly(a.bytes, b.bytes);
}
bool is_op(const Tried& what) { return what.flops > 0 || what.bytes > 0; }
bool is_time(const Tried& what) { return is_op(what) || what.name == "launch"; }

// The one in the middle, the lower of two.
double believed(std::vector<double> seconds) {
  const auto at = seconds.begin() + int64_t(seconds.size() - 1) / 2;
  std::nth_element(seconds.begin(), at, seconds.end());
  return *at;
}

// A lock on FILE.suffix; -1 where none can be had.
int open_lock(const std::string& path, const char* suffix) {
  if (path.empty()) return -1;
  std::error_code problem;
  fs::create_directories(fs::path(path).parent_path(), problem);
  return open((path + suffix).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
}

struct FileLock {
  explicit FileLock(const std::string& path) : file(open_lock(path, ".lock")) {
    while (file >= 0 && flock(file, LOCK_EX) != 0 && errno == EINTR) {
    }
  }
  ~FileLock() {
    if (file >= 0) close(file);
  }
  int file;
};

Json to_json(const std::vector<Kept>& list) {
  Json::Array array;
  for (const Kept& kept : list) {
    Json::Object entry{{"name", kept.name},   {"flops", kept.flops},
                       {"bytes", kept.bytes}, {is_time(kept) ? "seconds" : "rate", kept.value},
                       {"tries", kept.tries}, {"measured", kept.measured},
                       {"tried", kept.tried}};
    if (kept.disturbed) entry.emplace_back("disturbed", true);
    if (!kept.recent.empty()) entry.emplace_back("recent", Json::Array(kept.recent.begin(), kept.recent.end()));
    array.push_back(std::move(entry));
  }
  return array;
}

Kept kept_from(const Json& json) {
  const auto number = [&](const char* name) {
    const Json* value = json.find(name);
    return value ? value->number(name) : 0.0;
  };
  Kept kept;
  const Json* name = json.find("name");
  if (!name) throw Error("an entry without a name.");
  kept.name = name->string("name");
  kept.flops = number("flops"), kept.bytes = number("bytes");
  kept.value = number(is_time(kept) ? "seconds" : "rate");
  kept.tries = int64_t(number("tries")), kept.measured = int64_t(number("measured"));
  kept.tried = int64_t(number("tried"));
  if (const Json* disturbed = json.find("disturbed")) kept.disturbed = disturbed->boolean("disturbed");
  if (const Json* recent = json.find("recent"))
    for (const Json& seconds : recent->array("recent")) kept.recent.push_back(seconds.number("recent"));
  if (is_op(kept) == kept.recent.empty()) throw Error("an op without its tries, or a figure with such.");
  if (!(kept.value > 0) || !std::isfinite(kept.value)) throw Error("a rate that is not positive.");
  return kept;
}

}  // namespace

RatesCache::RatesCache(std::string path, Seconds clock)
    : path_(std::move(path)), clock_(clock ? std::move(clock) : [] { return int64_t(std::time(nullptr)); }) {
  read();
}

// What cannot be read leaves what is known to this object as it is. The file may be long, and a process plan hundreds
// of programs: what was read last is kept as long as the file is the same one, since it is only ever replaced.
void RatesCache::read() {
  struct stat now {};
  if (path_.empty() || stat(path_.c_str(), &now) != 0) return;
  static std::mutex mutex;
  static std::string path;
  static struct stat before {};
  static std::map<std::string, std::vector<Kept>> entries;
  const std::lock_guard lock(mutex);
  const auto identity = [](const struct stat& s) {
    return std::tuple(s.st_dev, s.st_ino, s.st_size, s.st_mtim.tv_sec, s.st_mtim.tv_nsec);
  };
  if (path == path_ && identity(before) == identity(now)) {
    entries_ = entries;
    return;
  }
  std::ifstream file(path_);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) return;
  take(text.str());
  path = path_, before = now, entries = entries_;
}

void RatesCache::take(const std::string& text) {
  if (text.empty()) return;
  std::map<std::string, std::vector<Kept>> found;
  try {
    const Json all = Json::parse(text, path_);
    const Json *version = all.find("version"), *entries = all.find("entries");
    if (!version || version->integer(path_) != kVersion || !entries) return;
    for (const auto& [key, list] : entries->object(path_))
      for (const Json& entry : list.array(path_)) found[key].push_back(kept_from(entry));
    entries_ = std::move(found);
  } catch (const Error&) {  // damaged: measured anew and replaced
  }
}

std::string RatesCache::text() const {
  Json::Object entries;
  for (const auto& [name, kept] : entries_) entries.emplace_back(name, to_json(kept));
  return Json(Json::Object{{"version", kVersion}, {"entries", std::move(entries)}}).dump(1) + "\n";
}

const std::vector<Kept>& RatesCache::of(const std::string& key) const {
  static const std::vector<Kept> kNone;
  const auto found = entries_.find(key);
  return found == entries_.end() ? kNone : found->second;
}

const Kept* RatesCache::find(const std::string& key, const Tried& what) const {
  for (const Kept& kept : of(key))
    if (same(kept, what)) return &kept;
  return nullptr;
}

bool RatesCache::stale(const Kept& kept) const {
  const int64_t now = clock_();
  return now - kept.measured > kMonth || kept.measured > now;
}

bool RatesCache::due(const std::string& key, const Tried& what) const {
  const Kept* kept = find(key, what);
  if (!kept || stale(*kept)) return true;
  if (kept->disturbed) return clock_() - kept->tried >= 60;
  return kept->tries < kTries && clock_() - kept->tried >= (int64_t{60} << (2 * std::max<int64_t>(0, kept->tries - 1)));
}

void RatesCache::add(const std::string& key, const std::vector<Tried>& tries) {
  if (tries.empty()) return;
  const FileLock lock(path_);
  read();  // what others have written
  std::vector<Kept>& list = entries_[key];
  const int64_t now = clock_();
  for (const Tried& tried : tries) {
    const auto found = std::find_if(list.begin(), list.end(), [&](const Kept& kept) { return same(kept, tried); });
    if (found == list.end()) {
      const auto of_name = [&](const Kept& kept) { return kept.name == tried.name; };
      if (size_t(std::count_if(list.begin(), list.end(), of_name)) >= kMostSamples)
        list.erase(std::find_if(list.begin(), list.end(), of_name));  // the oldest
      list.push_back({tried, 1, now, now, is_op(tried) ? std::vector{tried.value} : std::vector<double>{}});
      continue;
    }
    const bool old = stale(*found) || (is_time(tried) && found->disturbed && !tried.disturbed);
    found->tried = now;
    if (!old && is_time(tried) && tried.disturbed && !found->disturbed) continue;
    found->tries = old ? 1 : found->tries + 1;
    found->disturbed = tried.disturbed && (old || found->disturbed);
    double value = tried.value;
    if (is_op(tried)) {
      std::vector<double>& recent = found->recent;
      if (old) recent.clear();
      if (int64_t(recent.size()) >= kRecent) recent.erase(recent.begin());
      recent.push_back(tried.value);
      value = believed(recent);
      if (tried.disturbed && !old) value = std::min(value, found->value);
    } else if (!old) {
      value = is_time(tried) ? std::min(value, found->value) : std::max(value, found->value);
    }
    if (value != found->value || old) found->value = value, found->measured = now;
  }
  if (path_.empty()) return;
  try {
    write_atomically(path_, text());
  } catch (const Error&) {  // no cache: the next run measures again
  }
}

RatesCache::Measuring::Measuring(RatesCache& cache, double seconds) : file_(open_lock(cache.path_, ".measuring")) {
  const auto began = std::chrono::steady_clock::now();
  while (file_ >= 0 && flock(file_, LOCK_EX | LOCK_NB) != 0 &&
         std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() < seconds)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  cache.read();
}

RatesCache::Measuring::~Measuring() {
  if (file_ >= 0) close(file_);
}

}  // namespace strata
