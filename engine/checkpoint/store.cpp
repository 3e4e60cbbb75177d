// Saving and loading checkpoints; see store.h.
#include "engine/checkpoint/store.h"

#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <new>
#include <span>

#include "memory/input_file.h"
#include "memory/folder.h"
#include "strata/json.h"
#include "strata/convert.h"
#include "strata/error.h"

namespace strata {
namespace {

namespace fs = std::filesystem;
// Version 2 says where a piece lies by dimension ("offset", "extent"), version 1 by rows ("first", "rows").
constexpr int64_t kVersion = 2, kOldestVersion = 1;
constexpr int64_t kShardBytes = int64_t{4} << 30;
constexpr size_t kPiece = 4 << 20;  // bytes read at a time; a multiple of every dtype's size
const std::string kPrefix = "step-", kSaving = ".saving-";

std::string text_of(XXH128_hash_t hash) {
  char text[40];
  std::snprintf(text, sizeof text, "%016llx%016llx", (unsigned long long)hash.high64, (unsigned long long)hash.low64);
  return text;
}
std::string checksum(const void* data, size_t bytes) { return text_of(XXH3_128bits(data, bytes)); }

// A checksum of bytes that come in pieces.
class RunningChecksum {
 public:
  RunningChecksum() : state_(XXH3_createState()) {
    if (!state_) throw std::bad_alloc();
    XXH3_128bits_reset(state_.get());
  }
  void add(std::span<const std::byte> bytes) { XXH3_128bits_update(state_.get(), bytes.data(), bytes.size()); }
  std::string text() const { return text_of(XXH3_128bits_digest(state_.get())); }

 private:
  struct Free {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Free> state_;
};

Role role_of(const std::string& name, const std::string& where) {
  for (int r = 0; r < kRoles; ++r)
    if (name_of(Role(r)) == name) return Role(r);
  throw Error(where + " has the unknown role \"" + name + "\".");
}
DType dtype_of(const std::string& name, const std::string& where) {
  for (int d = 0; d <= int(DType::u8); ++d)
    if (name_of(DType(d)) == name) return DType(d);
  throw Error(where + " has the unknown dtype \"" + name + "\".");
}

struct Written {
  std::string file, checksum;
};

// What one rank wrote, as it goes into the manifest.
Json::Array entries_of(const std::vector<TensorRecord>& tensors, const std::vector<Written>& written) {
  Json::Array list;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorRecord& t = tensors[i];
    const Shape& whole = t.whole.empty() ? t.shape : t.whole;
    const Shape offset = t.offset.empty() ? Shape(t.shape.size(), 0) : t.offset;
    list.push_back(Json::Object{{"name", t.name},
                                {"role", std::string(name_of(t.role))},
                                {"dtype", std::string(name_of(t.dtype))},
                                {"shape", Json::Array(whole.begin(), whole.end())},
                                {"offset", Json::Array(offset.begin(), offset.end())},
                                {"extent", Json::Array(t.shape.begin(), t.shape.end())},
                                {"file", written[i].file},
                                {"xxh3", written[i].checksum}});
  }
  return list;
}

Json manifest(const CheckpointInfo& info, Json::Array tensors) {
  Json::Object notes;
  for (const auto& [key, value] : info.notes) notes.emplace_back(key, value);
  return Json::Object{{"format", "strata checkpoint"}, {"version", kVersion}, {"step", info.step},
                      {"samples", info.samples},       {"notes", notes},      {"config", info.config},
                      {"tensors", std::move(tensors)}};
}

// Files of at most kShardBytes, numbered from `count` on; returns for each tensor the one it is in. Each tensor is
// asked for once.
std::vector<Written> write_files(const fs::path& folder, const std::string& prefix,
                                 const std::vector<TensorRecord>& tensors, int& count) {
  std::vector<Written> result;
  std::vector<TensorToStore> shard;
  int64_t bytes = 0;
  const auto file_name = [&] {
    char text[16];
    std::snprintf(text, sizeof text, "%05d", count);
    return prefix + text + ".safetensors";
  };
  const auto flush = [&] {
    if (shard.empty()) return;
    std::vector<RunningChecksum> sums(shard.size());
    write_safetensors((folder / file_name()).string(), shard, {},
                      [&](size_t i, std::span<const std::byte> bytes) { sums[i].add(bytes); });
    for (const RunningChecksum& sum : sums) result.push_back({file_name(), sum.text()});
    shard.clear();
    bytes = 0;
    ++count;
  };
  for (const TensorRecord& t : tensors) {
    const int64_t size = elements(t.shape) * size_of(t.dtype);
    if (bytes > 0 && bytes + size > kShardBytes) flush();
    shard.push_back({t.name, t.dtype, t.shape, t.data});
    bytes += size;
  }
  flush();
  return result;
}

// Every rank's text, for rank 0; throws the first error among them ("!" and its message) on all. A rank that writes may
// take its time.
std::vector<std::string> agree(World* world, const std::string& mine) {
  const std::vector<std::string> all = world ? world->gather_to_zero(mine) : std::vector<std::string>{mine};
  std::string error;
  for (const std::string& text : all)
    if (error.empty() && !text.empty() && text[0] == '!') error = text;
  if (world) error = world->broadcast(error);
  if (!error.empty()) throw Error(error.substr(1), ExitCode::failed);
  return all;
}
// Takes its name away before anything in it goes, so that a kill leaves no folder that looks whole.
void discard(const fs::path& checkpoint) {
  std::error_code problem;
  const fs::path old = checkpoint.parent_path() / (kSaving + "old-" + checkpoint.filename().string());
  remove_folder(old.c_str());
  fs::rename(checkpoint, old, problem);
  remove_folder((problem ? checkpoint : old).c_str());
}

Error damaged(const SafetensorsFile& file, const std::string& name) {
  return Error(file.path() + ": tensor \"" + name +
               "\" is damaged: its checksum does not match. Use an older checkpoint.");
}

// A stored tensor's bytes from front to back, a little at a time, each read once and counted into the checksum.
class ForwardReader {
 public:
  ForwardReader(const SafetensorsFile& file, const StoredTensor& tensor)
      : file_(file), tensor_(tensor), piece_(std::min(tensor.bytes(), kPiece)) {}
  // Some bytes from `offset` on; never less than before.
  std::span<const std::byte> from(size_t offset) {
    while (offset >= end_) advance();
    return std::span(piece_).subspan(offset - (end_ - piece_.size()));
  }
  std::string checksum_of_all() {
    while (end_ < tensor_.bytes()) advance();
    return sum_.text();
  }

 private:
  void advance() {
    piece_.resize(std::min(kPiece, tensor_.bytes() - end_));
    file_.read(tensor_, end_, piece_);
    sum_.add(piece_);
    end_ += piece_.size();
  }
  const SafetensorsFile& file_;
  const StoredTensor& tensor_;
  std::vector<std::byte> piece_;
  size_t end_ = 0;  // of the piece
  RunningChecksum sum_;
};

// The same of any part, without a checksum.
class PartReader {
 public:
  PartReader(const SafetensorsFile& file, const StoredTensor& tensor) : file_(file), tensor_(tensor) {}
  // Some bytes from `offset` on.
  std::span<const std::byte> from(size_t offset) {
    if (offset < begin_ || offset >= begin_ + piece_.size()) {
      piece_.resize(std::min(kPiece, tensor_.bytes() - offset));
      file_.read(tensor_, begin_ = offset, piece_);
    }
    return std::span(piece_).subspan(offset - begin_);
  }

 private:
  const SafetensorsFile& file_;
  const StoredTensor& tensor_;
  std::vector<std::byte> piece_;
  size_t begin_ = 0;
};

std::string outcome_of(const std::function<std::string()>& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return "!out of memory.";
  } catch (const std::exception& error) {
    return std::string("!") + error.what();
  }
}

}  // namespace

CheckpointStore::CheckpointStore(std::string directory, int keep) : directory_(std::move(directory)), keep_(keep) {}

std::vector<std::string> CheckpointStore::all() const {
  std::vector<std::string> found;
  std::error_code problem;
  for (const std::string& name : names_in(directory_, problem)) {
    const fs::path path = fs::path(directory_) / name;
    if (name.rfind(kPrefix, 0) == 0 && fs::exists(path / "manifest.json")) found.push_back(path.string());
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::optional<std::string> CheckpointStore::latest() const {
  const auto found = all();
  return found.empty() ? std::nullopt : std::optional(found.back());
}

CheckpointStore::Saving::Saving(CheckpointStore& store, CheckpointInfo info, World* world)
    : store_(store), info_(std::move(info)), world_(world && world->size() > 1 ? world : nullptr) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%08lld", (long long)info_.step);
  const fs::path folder(store.directory_);
  hidden_ = (folder / (kSaving + name)).string();
  target_ = (folder / name).string();
  agree(world_, outcome_of([&]() -> std::string {
          if (world_ && world_->rank() != 0) return "";
          std::error_code problem;
          for (const std::string& entry : names_in(folder, problem))
            if (entry.rfind(kSaving, 0) == 0) remove_folder((folder / entry).c_str());
          fs::create_directory(hidden_, problem);
          if (problem) throw Error(hidden_ + ": cannot make the folder: " + problem.message() + ".");
          return "";
        }));
}

CheckpointStore::Saving::~Saving() {
  if (!committed_ && (!world_ || world_->rank() == 0)) remove_folder(hidden_.c_str());
}

void CheckpointStore::Saving::write(const std::vector<TensorRecord>& tensors) {
  char prefix[32] = "tensors-";
  if (world_) std::snprintf(prefix, sizeof prefix, "tensors-rank%05d-", world_->rank());
  const std::string outcome = outcome_of([&] {
    const auto files = write_files(hidden_, prefix, tensors, files_);
    for (Json& one : entries_of(tensors, files)) written_.push_back(std::move(one));
    return std::string();
  });
  if (problem_.empty()) problem_ = outcome;
}

void CheckpointStore::Saving::commit() {
  const auto lists = agree(world_, outcome_of([&] {
                             if (!problem_.empty()) return problem_;
                             sync_folder(hidden_);
                             return Json(std::move(written_)).dump();
                           }));
  agree(world_, outcome_of([&]() -> std::string {
          if (world_ && world_->rank() != 0) return "";
          Json::Array all;
          for (const std::string& list : lists) {
            const Json parsed = Json::parse(list, "a rank's list");
            for (const Json& one : parsed.array("a rank's list")) all.push_back(one);
          }
          const Json content = manifest(info_, std::move(all));
          const std::string text = content.dump();
          AtomicFile file((fs::path(hidden_) / "manifest.json").string());
          file.write(Json(Json::Object{{"xxh3", checksum(text.data(), text.size())}, {"content", content}}).dump(1) +
                     "\n");
          file.commit();
          sync_folder(hidden_);
          if (fs::exists(target_)) discard(target_);  // the same step saved before a resume
          std::error_code problem;
          fs::rename(hidden_, target_, problem);
          if (problem) throw Error(target_ + ": cannot rename the finished checkpoint: " + problem.message() + ".");
          sync_folder(store_.directory_);
          return "";
        }));
  committed_ = true;
  if (world_ && world_->rank() != 0) return;
  const auto found = store_.all();
  for (size_t i = 0; i + size_t(store_.keep_) < found.size(); ++i) discard(found[i]);
}

void CheckpointStore::save(const CheckpointInfo& info, const std::vector<TensorRecord>& tensors, World* world) {
  Saving saving(*this, info, world);
  saving.write(tensors);
  saving.commit();
}

namespace {

Shape shape_of(const Json& list, const std::string& where) {
  Shape shape;
  for (const Json& size : list.array(where)) shape.push_back(size.integer(where));
  return shape;
}

bool lies_within(const Box& box, const Shape& whole) {
  if (box.offset.size() != whole.size() || box.extent.size() != whole.size()) return false;
  for (size_t d = 0; d < whole.size(); ++d)
    if (box.offset[d] < 0 || box.extent[d] < 0 || box.offset[d] > whole[d] || box.extent[d] > whole[d] - box.offset[d])
      return false;
  return true;
}

// Whether pieces, sorted by where they begin, hold every element of a tensor once: as many elements, and none twice.
bool make_up_the_whole(const std::vector<Checkpoint::StoredBox>& pieces, const Shape& whole) {
  __int128 held = 0, wanted = 1;
  constexpr __int128 kMost = __int128{1} << 62;
  for (int64_t size : whole)
    if ((wanted *= std::max<int64_t>(0, size)) > kMost) return false;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Box& box = pieces[i].box;
    held += elements(box.extent);
    for (size_t j = i + 1; j < pieces.size() && pieces[j].box.offset[0] < box.offset[0] + box.extent[0]; ++j)
      if (overlap(box, pieces[j].box)) return false;
  }
  return held == wanted;
}

}  // namespace

Checkpoint::Checkpoint(const std::string& path, ManifestChecksum manifest) : path_(path) {
  const std::string file = (fs::path(path) / "manifest.json").string();
  if (!fs::exists(file)) throw Error(path + ": is no checkpoint: it has no manifest.json.");
  const Json whole = Json::parse(read_text(file), file);
  const Json *content = whole.find("content"), *sum = whole.find("xxh3");
  if (!content || !sum) throw Error(file + ": is no manifest of a Strata checkpoint.");
  const std::string text = content->dump();
  if (manifest == ManifestChecksum::verify && sum->string(file + ": xxh3") != checksum(text.data(), text.size()))
    throw Error(file + ": is damaged: its checksum does not match. Use an older checkpoint.");
  const auto field = [&](const Json& from, const char* key, const std::string& where) -> const Json& {
    const Json* value = from.find(key);
    if (!value) throw Error(where + " lacks \"" + key + "\".");
    return *value;
  };
  const int64_t version = field(*content, "version", file).integer(file + ": version");
  if (version < kOldestVersion || version > kVersion)
    throw Error(file + ": has version " + std::to_string(version) +
                " of the checkpoint format; this Strata reads versions " + std::to_string(kOldestVersion) + " to " +
                std::to_string(kVersion) + ".");
  info_.step = field(*content, "step", file).integer(file + ": step");
  info_.samples = field(*content, "samples", file).integer(file + ": samples");
  info_.config = field(*content, "config", file).string(file + ": config");
  for (const auto& [key, value] : field(*content, "notes", file).object(file + ": notes"))
    info_.notes[key] = value.string(file + ": note " + key);
  for (const Json& item : field(*content, "tensors", file).array(file + ": tensors")) {
    const std::string name = field(item, "name", file).string(file + ": a name"),
                      where = file + ": tensor \"" + name + "\"";
    Entry entry{role_of(field(item, "role", where).string(where), where),
                dtype_of(field(item, "dtype", where).string(where), where),
                {},
                {}};
    entry.shape = shape_of(field(item, "shape", where), where);
    if (entry.shape.empty()) throw Error(where + " has no shape.");
    StoredBox piece{field(item, "file", where).string(where), field(item, "xxh3", where).string(where),
                    whole_box(entry.shape)};
    if (version == 1) {
      if (const Json* first = item.find("first")) piece.box.offset[0] = first->integer(where);
      if (const Json* rows = item.find("rows")) piece.box.extent[0] = rows->integer(where);
    } else {
      piece.box = {shape_of(field(item, "offset", where), where), shape_of(field(item, "extent", where), where)};
    }
    if (piece.file.find('/') != std::string::npos) throw Error(where + " names a file outside of the checkpoint.");
    if (!lies_within(piece.box, entry.shape)) throw Error(where + " has a piece that lies outside of it.");
    if (auto& opened = files_[piece.file]; !opened)
      opened = std::make_shared<SafetensorsFile>((fs::path(path) / piece.file).string());
    const auto [at, fresh] = entries_.emplace(name, entry);
    if (!fresh && (at->second.shape != entry.shape || at->second.dtype != entry.dtype))
      throw Error(where + " has pieces of different shapes or types.");
    at->second.pieces.push_back(std::move(piece));
  }
  for (auto& [name, entry] : entries_) {
    std::sort(entry.pieces.begin(), entry.pieces.end(),
              [](const StoredBox& a, const StoredBox& b) { return a.box.offset < b.box.offset; });
    if (!make_up_the_whole(entry.pieces, entry.shape))
      throw Error(file + ": tensor \"" + name + "\": its pieces do not make up the whole. Use an older checkpoint.");
  }
}

void Checkpoint::read(const std::string& name, DType dtype, const Shape& shape, void* out) const {
  read_box(name, dtype, shape, whole_box(shape), 0, elements(shape), out);
}

// Where a piece is, after checking its size.
const StoredTensor& Checkpoint::stored(const std::string& name, const Entry& entry, const StoredBox& piece) const {
  const SafetensorsFile& file = *files_.at(piece.file);
  const auto found = file.tensors().find(name);
  if (found == file.tensors().end())
    throw Error(file.path() + ": lacks the tensor \"" + name + "\" that the manifest promises.");
  if (found->second.bytes() != size_t(elements(piece.box.extent) * size_of(entry.dtype))) throw damaged(file, name);
  return found->second;
}

void Checkpoint::verify() const {
  for (const auto& [name, entry] : entries_)
    for (const StoredBox& piece : entry.pieces) {
      const SafetensorsFile& file = *files_.at(piece.file);
      if (ForwardReader(file, stored(name, entry, piece)).checksum_of_all() != piece.checksum)
        throw damaged(file, name);
    }
}

void Checkpoint::read_box(const std::string& name, DType dtype, const Shape& shape, const Box& box, int64_t first,
                          int64_t count, void* out) const {
  const auto found = entries_.find(name);
  if (found == entries_.end())
    throw Error(path_ + ": holds no tensor \"" + name + "\"; it is a checkpoint of another model or other plugins.");
  const Entry& entry = found->second;
  // Numbers of 16 and 32 bits stand for each other: which of them a state is kept in is a strategy.
  const auto converts = [](DType type) { return type == DType::f32 || is_half(type); };
  if (entry.shape != shape || (entry.dtype != dtype && !(converts(entry.dtype) && converts(dtype))))
    throw Error(path_ + ": tensor \"" + name + "\" is " + std::string(name_of(entry.dtype)) + text(entry.shape) +
                ", but this model has " + std::string(name_of(dtype)) + text(shape) +
                "; it is a checkpoint of another model.");
  for (const StoredBox& piece : entry.pieces) {
    if (!overlap(piece.box, box)) continue;
    const SafetensorsFile& file = *files_.at(piece.file);
    const int64_t size = size_of(entry.dtype);
    const StoredTensor& where = stored(name, entry, piece);
    const auto copy = [&](auto& reader) {
      for_common(piece.box, box, [&](int64_t from, int64_t to, int64_t run) {
        const int64_t skipped = std::max<int64_t>(0, first - to);
        run = std::min(to + run, first + count) - to - skipped;
        from += skipped, to += skipped;
        while (run > 0) {
          const std::span<const std::byte> bytes = reader.from(size_t(from * size));
          const int64_t some = std::min(run, int64_t(bytes.size()) / size);
          if (entry.dtype == dtype)
            std::memcpy(at(out, dtype, to - first), bytes.data(), size_t(some * size));
          else
            convert(entry.dtype, bytes.data(), dtype, at(out, dtype, to - first), some);
          from += some, to += some, run -= some;
        }
      });
    };
    ForwardReader checking(file, where);
    if (count == elements(box.extent)) {  // each byte is read once
      copy(checking);
      piece.checked = false;
    }
    if (!piece.checked && checking.checksum_of_all() != piece.checksum) throw damaged(file, name);
    piece.checked = true;
    if (count == elements(box.extent)) continue;
    PartReader part(file, where);
    copy(part);
  }
}

namespace {

bool is_hugging_face(const fs::path& folder) {
  if (!fs::exists(folder / "config.json")) return false;
  for (const char* name : {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"})
    if (fs::exists(folder / name)) return true;
  return false;
}

}  // namespace

std::string find_checkpoint(const std::string& path, const std::string& option) {
  if (fs::exists(fs::path(path) / "manifest.json")) return path;
  if (!fs::is_directory(path)) throw Error(path + ": there is no checkpoint or run folder here (" + option + ").");
  const auto newest = CheckpointStore(path, 1).latest();
  if (!newest && is_hugging_face(path))
    throw Error(path + ": is a Hugging Face folder, not a checkpoint (" + option + "). Turn it into one with: strata " +
                "import " + path + " FOLDER, and name that folder here.");
  if (!newest) throw Error(path + ": holds no checkpoint (" + option + ").");
  return *newest;
}

}  // namespace strata
