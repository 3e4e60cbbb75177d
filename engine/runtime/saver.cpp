// Saving and loading the state of a run; see saver.h.
#include "engine/runtime/saver.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <sstream>

#include "engine/planning/unroll.h"
#include "strata/error.h"
#include "strata/layout.h"

namespace strata {
namespace {

// What working copies of mixed precision are in a checkpoint: nothing, or where nothing has more bits, the parameter.
bool has_master(const Tensor& tensor) { return !tensor.lasting->rounded_from.empty() && !tensor.lasting->frozen; }
const Name& name_of(const Tensor& tensor) {
  if (!tensor.lasting->stands_for.empty()) return tensor.lasting->stands_for;
  return tensor.lasting->rounded_from.empty() ? tensor.name : tensor.lasting->rounded_from;
}

// What a checkpoint calls the value that one of the ranks that train apart has.
std::string name_of_own(const std::string& name, int coordinate) {
  return name + ".apart." + std::to_string(coordinate);
}

int64_t room(const Tensor& tensor) { return (tensor.bytes() + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

void read_into(const Checkpoint& checkpoint, const Tensor& tensor, void* out, int64_t first, int64_t count) {
  read_into(checkpoint, tensor, name_of(tensor), out, first, count);
}

void read_into(const Checkpoint& checkpoint, const Tensor& tensor, const std::string& name, void* out, int64_t first,
               int64_t count) {
  // A constant that a strategy begins with (a loss scale) is not in the checkpoints of runs without that strategy.
  if (tensor.lasting->initializer.kind == Initializer::Kind::constant && !checkpoint.tensors().contains(name)) {
    std::fill_n(static_cast<double*>(out), count, tensor.lasting->initializer.value);
    return;
  }
  checkpoint.read_box(name, tensor.dtype, tensor.full_shape(), box_of(tensor), first, count, out);
}

bool is_in(const Checkpoint& checkpoint, const Tensor& tensor) {
  return !tensor.lasting->added || checkpoint.tensors().contains(name_of(tensor));
}

bool writes(const Tensor& tensor, const Mesh& mesh) {
  if (tensor.role == Role::scalar || has_master(tensor) || tensor.lasting->unsaved) return false;
  const auto splits = [&](std::string_view axis) {
    return std::any_of(tensor.layout.begin(), tensor.layout.end(),
                       [&](const Split& split) { return mesh.meet(split.axis, axis); });
  };
  const std::string& own_over = tensor.lasting->own_over;
  const auto own = [&](std::string_view axis) { return !own_over.empty() && mesh.meet(own_over, axis); };
  // Along an axis that does not split it all ranks hold the same, unless they train apart or have programs of their
  // own.
  return std::all_of(mesh.axes().begin(), mesh.axes().end(), [&](const Axis& axis) {
    return axis.coordinate == 0 || axis.own_programs || splits(axis.name) || own(axis.name);
  });
}

namespace {

bool is_kept(std::string_view name) { return name.find(kKept) != name.npos; }

// Names of what ranks of an earlier program write (stages of a pipeline): what several have alike is written once.
std::set<std::string> written_before(const std::vector<Tensor>& tensors, const Mesh& mesh, World& world) {
  std::set<std::string> names;
  if (mesh.programs().size == 1) return names;
  std::string own;
  for (const Tensor& tensor : tensors)
    if (writes(tensor, mesh)) own += tensor.name + "\n";
  const std::vector<std::string> all = world.gather(own);
  for (int rank = 0; rank < int(all.size()); ++rank) {
    if (Mesh(rank, mesh.sizes()).programs().coordinate >= mesh.programs().coordinate) continue;
    std::istringstream lines(all[size_t(rank)]);
    for (std::string name; std::getline(lines, name);) names.insert(name);
  }
  return names;
}

}  // namespace

int64_t snapshot_bytes(const std::vector<Tensor>& tensors, const Mesh& mesh) {
  int64_t bytes = 0;
  for (const Tensor& tensor : tensors)
    if (tensor.persistent && !tensor.part_of && tensor.home != Tier::nvme && writes(tensor, mesh))
      bytes += room(tensor);
  return bytes;
}

Saver::Saver(Storage& storage, const Mesh& mesh, World& world, Threads& threads, std::string directory, int keep,
             bool behind)
    : storage_(storage),
      mesh_(mesh),
      world_(world),
      threads_(threads),
      store_(std::move(directory), keep),
      behind_(behind),
      written_before_(written_before(storage.persistent_tensors(), mesh, world)) {
  for (const Tensor& tensor : storage.persistent_tensors()) stood_for_.insert(tensor.lasting->stands_for);
  if (behind) snapshot_ = Arena(snapshot_bytes(storage.persistent_tensors(), mesh));
}

Saver::~Saver() {
  if (writing_.valid()) writing_.wait();
}

// Whether a checkpoint has something of microbatches under way of which this run does not go on, though it is of a
// tensor that it has.
bool Saver::keeps_other(const Checkpoint& checkpoint) const {
  std::set<std::string> own;
  for (const Tensor& tensor : storage_.persistent_tensors()) own.insert(tensor.name);
  return std::any_of(checkpoint.tensors().begin(), checkpoint.tensors().end(), [&](const auto& entry) {
    std::string of = entry.first.substr(0, entry.first.find(kKept));
    if (!is_kept(entry.first) || own.contains(entry.first)) return false;
    if (const std::string_view gradient = ".gradient"; of.ends_with(gradient)) of.resize(of.size() - gradient.size());
    return own.contains(of);
  });
}

// Under a tensor's own name is what stands for it, or the value of the first of the ranks that train apart.
std::string Saver::stored_name(const Tensor& tensor) const {
  const std::string& name = name_of(tensor);
  const std::string& over = tensor.lasting->own_over;
  if (over.empty()) return name;
  const int coordinate = mesh_[over].coordinate;
  return coordinate == 0 && !stood_for_.contains(name) ? name : name_of_own(name, coordinate);
}

// Of each of the ranks that train apart a value, and of no more.
bool Saver::holds_own(const Checkpoint& checkpoint, const Tensor& tensor) const {
  const int ranks = mesh_.size(tensor.lasting->own_over);
  const auto holds = [&](int coordinate) {
    return checkpoint.tensors().contains(name_of_own(name_of(tensor), coordinate));
  };
  return holds(ranks - 1) && !holds(ranks);
}

Saver::Loaded Saver::load(const std::string& path, bool everything, uint64_t seed,
                          const std::function<void(const CheckpointInfo&)>& check) {
  const Checkpoint checkpoint(path);
  if (check) check(checkpoint.info());
  Loaded loaded{.info = checkpoint.info(),
                .begun_anew = {},
                .begun_together = {},
                .dropped = everything && keeps_other(checkpoint)};
  const auto lacks = [&](const Tensor& tensor, const std::string& name) {
    const auto found = checkpoint.tensors().find(name);
    return found == checkpoint.tensors().end() || found->second.shape != tensor.full_shape();
  };
  std::set<std::string> masters;
  for (const Tensor& tensor : storage_.persistent_tensors()) masters.insert(tensor.lasting->rounded_from);
  for (const Tensor& tensor : storage_.persistent_tensors())
    if (tensor.lasting->unsaved) {
      storage_.initialize(tensor, seed, threads_);
    } else if ((tensor.role == Role::parameter || masters.contains(tensor.name) ||
                !tensor.lasting->stands_for.empty() || has_master(tensor) ||
                (everything && tensor.role != Role::scalar)) &&
               is_in(checkpoint, tensor)) {
      if (is_kept(tensor.name.text()) && lacks(tensor, tensor.name))
        throw Error(path + ": its run did not leave the same of its last step to the next one (\"" +
                    std::string(tensor.name) +
                    "\"). Resume with the schedule, stages, ranks and microbatches that it was saved with, or begin a "
                    "run with its parameters (run.initialize).");
      const bool is_own = everything && !tensor.lasting->own_over.empty();
      const bool goes_on = is_own && holds_own(checkpoint, tensor);
      const std::string name = goes_on ? stored_name(tensor) : name_of(tensor).text();
      if (tensor.lasting->begins_anew && (lacks(tensor, name) || is_own != goes_on)) {
        storage_.initialize(tensor, seed, threads_);
        loaded.begun_anew.push_back(tensor.name);
        continue;
      }
      if (is_own != goes_on) loaded.begun_together.push_back(tensor.name);
      storage_.fill(tensor, [&](void* out, int64_t first, int64_t count) {
        read_into(checkpoint, tensor, name, out, first, count);
      });
    }
  storage_.release_piece();
  return loaded;
}

std::vector<TensorRecord> Saver::records(bool on_nvme) {
  std::vector<TensorRecord> list;
  for (const Tensor& tensor : storage_.persistent_tensors())
    if (writes(tensor, mesh_) && !written_before_.contains(tensor.name) && (tensor.home == Tier::nvme) == on_nvme)
      list.push_back({stored_name(tensor), tensor.lasting->stands_for.empty() ? tensor.role : Role::parameter,
                      tensor.dtype, tensor.shape,
                      std::function<void(const TensorBytes::Take&)>(
                          [this, &tensor](const TensorBytes::Take& take) { storage_.each(tensor, take); }),
                      box_of(tensor).offset, tensor.full_shape()});
  return list;
}

std::string Saver::save(const CheckpointInfo& info) {
  const std::string before = finish();
  try {
    auto saving = std::make_shared<CheckpointStore::Saving>(store_, info, &world_);
    saving->write(records(true));
    storage_.release_piece();
    std::vector<TensorRecord> rest = records(false);
    if (!behind_) {
      saving->write(rest);
      saving->commit();
      return before;
    }
    std::byte* at = snapshot_.base();
    for (TensorRecord& record : rest) {
      const int64_t bytes = elements(record.shape) * size_of(record.dtype);
      int64_t done = 0;
      record.data.each(bytes, [&](std::span<const std::byte> from) {
        threads_.split(int64_t(from.size()), 1 << 16, [&](int64_t begin, int64_t end) {
          std::memcpy(at + done + begin, from.data() + begin, size_t(end - begin));
        });
        done += int64_t(from.size());
      });
      record.data = TensorBytes(static_cast<const void*>(at));
      at += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
    writing_ = std::async(std::launch::async, [saving, rest = std::move(rest)]() -> std::string {
      try {
        saving->write(rest);
        saving->commit();
        return "";
      } catch (const std::bad_alloc&) {
        return "out of memory.";
      } catch (const std::exception& error) {
        return error.what();
      }
    });
  } catch (const Error& error) {
    return error.what();
  }
  return before;
}

std::string Saver::finish() { return writing_.valid() ? writing_.get() : ""; }

}  // namespace strata
