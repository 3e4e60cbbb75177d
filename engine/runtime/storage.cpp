// Storage and first values of persistent tensors; see storage.h.
#include "engine/runtime/storage.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "memory/disk.h"
#include "strata/convert.h"
#include "strata/layout.h"
#include "strata/op_kind.h"
#include "strata/random.h"
#include "strata/stages.h"

namespace strata {
namespace {

// Of the tensor whose first values it has.
const Name& first_name(const Tensor& tensor) {
  const Lasting& lasting = *tensor.lasting;
  if (!lasting.stands_for.empty()) return lasting.stands_for;
  return lasting.rounded_from.empty() ? tensor.name : lasting.rounded_from;
}

// The bytes of a tier's transient region: the most that one of the plans needs.
int64_t transient_bytes(Tier tier, const MemoryPlan& plan, const std::vector<const MemoryPlan*>& also) {
  int64_t bytes = plan.tiers[int(tier)].transient_bytes;
  for (const MemoryPlan* other : also) bytes = std::max(bytes, other->tiers[int(tier)].transient_bytes);
  return bytes;
}

int64_t padded(int64_t bytes) { return (bytes + kStorageAlignment - 1) / kStorageAlignment * kStorageAlignment; }

// The NVMe tier of so many bytes.
NvmeStore::Options nvme_options(const std::vector<std::string>& directories, const MemoryPlan& plan, int64_t bytes,
                                NvmeStore::Faults faults) {
  if (directories.empty()) throw Error("tensors are to rest on the NVMe tier, but no plugin names a directory for it.");
  return {.directories = directories,
          .stripes = plan.stripes.value_or(Stripes::even(directories.size())),
          .bytes = padded(bytes),
          .faults = std::move(faults)};
}

}  // namespace

class Storage::Slot final : public StorageSlot {
 public:
  Slot(Nvme& nvme, const Tensor& tensor, int64_t offset)
      : nvme_(nvme), name_(tensor.name), offset_(offset), bytes_(padded(tensor.bytes())) {}
  void read(void* to) override {
    if (!nvme_.is_direct(to)) return nvme_.reading.read(offset_, to, bytes_, name_);
    named([&] { nvme_.direct->read(offset_, to, bytes_); });
  }
  void write(const void* from) override {
    if (!nvme_.is_direct(from)) return nvme_.writing.write(offset_, from, bytes_, name_);
    named([&] { nvme_.direct->write(offset_, from, bytes_); });
  }
  // The same of a part of the tensor, to and from host memory of padded(bytes) bytes.
  void read_part(int64_t first, void* to, int64_t bytes) {
    nvme_.reading.read(offset_ + first, to, padded(bytes), name_);
  }
  void write_part(int64_t first, const void* from, int64_t bytes) {
    nvme_.writing.write(offset_ + first, from, padded(bytes), name_);
  }

 private:
  void named(const auto& transfer) const try { transfer(); } catch (const Error& error) {
    throw Error("tensor \"" + name_ + "\" between the disk and the device: " + error.what(), error.code());
  }

  Nvme& nvme_;
  std::string name_;
  int64_t offset_, bytes_;
};

Storage::Storage(const Program& program, const MemoryPlan& plan, const std::vector<const MemoryPlan*>& also,
                 NvmeStore::Faults faults, Device* device, int shared_file)
    : device_(device) {
  for (int t = 0; t < kTiers; ++t) {
    persistent_bytes_[t] = plan.tiers[t].persistent_bytes;
    bytes_[t] = persistent_bytes_[t] + transient_bytes(Tier(t), plan, also);
    if (Tier(t) == Tier::nvme) continue;
    if (device_) {
      bases_[t] = static_cast<std::byte*>(device_->allocate(Tier(t), bytes_[t]));
    } else {
      arenas_[t] = Arena(bytes_[t]);
      if (shared_file >= 0) arenas_[t].share(shared_file, plan.tiers[t].shared_bytes);
      bases_[t] = arenas_[t].base();
    }
  }
  if (shared_file >= 0) close(shared_file);
  if (bytes(Tier::nvme) > 0) {
    const std::vector<std::string>& directories = program.storage_directories;
    nvme_ = std::make_unique<Nvme>(nvme_options(directories, plan, bytes(Tier::nvme), std::move(faults)));
    note_ = nvme_->store.note();
    if (const std::string same = same_disk_note(directories); !same.empty()) note_ += (note_.empty() ? "" : " ") + same;
    if (device_ && program.direct_storage) {
      if (!nvme_->store.direct()) throw Error("device.direct_storage needs direct I/O, but " + nvme_->store.note());
      nvme_->direct = device_->open_file(nvme_->store.file(0), base(Tier::device), bytes(Tier::device));
      nvme_->device_begin = base(Tier::device);
      nvme_->device_end = base(Tier::device) + bytes(Tier::device);
    }
  }
  for (size_t i = 0; i < program.tensors.size(); ++i) {
    const Tensor& tensor = program.tensors[i];
    if (!tensor.persistent || tensor.part_of) continue;
    tensors_.push_back(tensor);
    if (device_ && is_shared(tensor)) {
      places_[tensor.name] = shared_memory(tensor.bytes());
      if (tensor.home == Tier::device)
        device_copies_[tensor.name] = base(Tier::device) + plan.persistent_offset.at(int32_t(i));
    } else if (tensor.home != Tier::nvme) {
      places_[tensor.name] = base(tensor.home) + plan.persistent_offset.at(int32_t(i));
    } else {
      slots_.push_back(std::make_unique<Slot>(*nvme_, tensor, plan.persistent_offset.at(int32_t(i))));
      places_[tensor.name] = slots_.back().get();
    }
  }
}

void Storage::look(const std::vector<std::string>& directories, const MemoryPlan& plan,
                   const std::vector<const MemoryPlan*>& also) {
  const int64_t bytes = plan.tiers[int(Tier::nvme)].persistent_bytes + transient_bytes(Tier::nvme, plan, also);
  if (bytes > 0) NvmeStore::look(nvme_options(directories, plan, bytes, {}));
}

Storage::~Storage() {
  if (!device_) return;
  if (nvme_) nvme_->direct.reset();
  for (Tier tier : {Tier::device, Tier::host})
    if (bases_[int(tier)]) device_->release(tier, bases_[int(tier)]);
  for (std::byte* memory : shared_) device_->release(Tier::host, memory);
}

std::byte* Storage::shared_memory(int64_t bytes) {
  if (!device_) return shared_arenas_.emplace_back(bytes).base();
  shared_.push_back(static_cast<std::byte*>(device_->allocate(Tier::host, bytes)));
  std::memset(shared_.back(), 0, size_t(bytes));
  return shared_.back();
}

void* Storage::persistent(std::string_view name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? nullptr : found->second;
}

void Storage::set_scalar(std::string_view name, double value) {
  const auto found =
      std::find_if(tensors_.begin(), tensors_.end(), [&](const Tensor& tensor) { return tensor.name == name; });
  if (found == tensors_.end()) {
    if (name == kStepScalar || name == kSeedScalar || name == kLearningRateFactor || name == kLossWeight) return;
    std::vector<std::string> names;
    for (const Tensor& tensor : tensors_)
      if (tensor.role == Role::scalar) names.push_back(tensor.name);
    throw Error("no scalar is named \"" + std::string(name) + "\" in this program." + did_you_mean(name, names));
  }
  if (found->role != Role::scalar || !is_shared(*found) || found->home == Tier::nvme)
    throw Error("\"" + std::string(name) + "\" is no scalar, but one of the " + std::string(name_of(found->role)) +
                ", " + std::string(name_of(found->dtype)) + text(found->shape) +
                "; only what Builder::scalar declares can be set.");
  *static_cast<double*>(persistent(name)) = value;
}

void* Storage::device_copy(std::string_view name) const {
  const auto found = device_copies_.find(name);
  return found == device_copies_.end() ? nullptr : found->second;
}

std::unique_ptr<StorageSlot> Storage::transient_slot(const Tensor& tensor, int64_t offset) const {
  return std::make_unique<Slot>(*nvme_, tensor, persistent_bytes(Tier::nvme) + offset);
}

std::unique_ptr<StorageSlot> Storage::part_slot(const Tensor& tensor, int64_t offset) const {
  return std::make_unique<Slot>(*nvme_, tensor, offset);
}

bool Storage::away(const Tensor& tensor) const { return device_ && tensor.home == Tier::device && !is_shared(tensor); }

std::byte* Storage::piece() {
  static_assert(kPiece % kStorageAlignment == 0);
  if (piece_.bytes() == 0) piece_ = Arena(kPiece);
  return piece_.base();
}

void Storage::each(const Tensor& tensor, const Take& take) {
  STRATA_CHECK(!holder_);
  auto* const place = static_cast<std::byte*>(persistent(tensor.name.text()));
  if (tensor.home != Tier::nvme && !away(tensor)) return take({place, size_t(tensor.bytes())});
  for (int64_t first = 0; first < tensor.bytes(); first += kPiece) {
    const int64_t bytes = std::min(kPiece, tensor.bytes() - first);
    if (away(tensor))
      device_->copy(piece(), place + first, bytes);
    else
      static_cast<Slot*>(persistent(tensor.name.text()))->read_part(first, piece(), bytes);
    take({piece(), size_t(bytes)});
  }
}

void Storage::fill(const Tensor& tensor, const Write& write) {
  STRATA_CHECK(!holder_);
  auto* const place = static_cast<std::byte*>(persistent(tensor.name.text()));
  const int64_t size = size_of(tensor.dtype);
  if (tensor.home != Tier::nvme && !away(tensor)) return write(place, 0, elements(tensor.shape));
  for (int64_t first = 0; first < tensor.bytes(); first += kPiece) {
    const int64_t bytes = std::min(kPiece, tensor.bytes() - first);
    write(piece(), first / size, bytes / size);
    if (away(tensor))
      device_->copy(place + first, piece(), bytes);
    else
      static_cast<Slot*>(persistent(tensor.name.text()))->write_part(first, piece(), bytes);
  }
}

std::vector<std::byte> Storage::copy(const Tensor& tensor) {
  std::vector<std::byte> all;
  each(tensor, [&](std::span<const std::byte> bytes) { all.insert(all.end(), bytes.begin(), bytes.end()); });
  return all;
}

void Storage::initialize(uint64_t seed, Threads& threads) {
  for (const Tensor& tensor : tensors_) initialize(tensor, seed, threads);
  release_piece();
}

void Storage::initialize(const Tensor& tensor, uint64_t seed, Threads& threads) {
  fill(tensor, [&](void* data, int64_t first, int64_t count) {
    switch (tensor.lasting->initializer.kind) {
      case Initializer::Kind::zeros:
        std::memset(data, 0, size_t(count * size_of(tensor.dtype)));
        break;
      case Initializer::Kind::constant:
        STRATA_CHECK(tensor.dtype == DType::f64);
        std::fill_n(static_cast<double*>(data), count, tensor.lasting->initializer.value);
        break;
      case Initializer::Kind::ones:
      case Initializer::Kind::normal:
        threads.split(count, 4096, [&](int64_t begin, int64_t end) {
          constexpr int64_t kChunk = 1024;
          float values[kChunk];
          const uint64_t stream = stream_of(first_name(tensor).text());
          const GlobalIndex global(tensor);
          for (int64_t i = begin; i < end; i += kChunk) {
            const int64_t some = std::min(kChunk, end - i);
            if (tensor.lasting->initializer.kind == Initializer::Kind::ones)
              std::fill_n(values, some, 1.0f);
            else
              global.runs(first + i, first + i + some, [&](int64_t local, int64_t index, int64_t run) {
                fill_normal(values + (local - first - i), index, run, tensor.lasting->initializer.value, seed, stream);
              });
            from_f32(tensor.dtype, values, at(data, tensor.dtype, i), some);
          }
        });
        break;
    }
  });
}

}  // namespace strata
