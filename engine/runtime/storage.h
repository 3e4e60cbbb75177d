// The memory of a run: an arena a tier in RAM and a store for the NVMe tier, laid out by the plan of the training
// program. Other programs over the same persistent tensors (validation, generation) find those by name and borrow the
// transient regions between steps.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/planning/memory_plan.h"
#include "memory/arena.h"
#include "memory/nvme_store.h"
#include "strata/device.h"
#include "strata/threads.h"

namespace strata {

class Storage {
 public:
  // Persistent tensors live where `plan` says; transient regions hold the most of the plan and of `also`, the plans of
  // other programs that will run here. Throws Error when a directory of the NVMe tier cannot be used.
  // `device`: where the arenas come from when it is not the host's own memory; outlives this. It opens the NVMe tier's
  // file itself when a program moves bytes between the two. `faults` is for tests. `shared_file`: the memory of what
  // the plan has ranks share, mapped and closed here.
  Storage(const Program& program, const MemoryPlan& plan, const std::vector<const MemoryPlan*>& also = {},
          NvmeStore::Faults faults = {}, Device* device = nullptr, int shared_file = -1);
  ~Storage();
  // Throws what the constructor would throw of the NVMe tier's directories now; allocates nothing, leaves nothing
  // there.
  static void look(const std::vector<std::string>& directories, const MemoryPlan& plan,
                   const std::vector<const MemoryPlan*>& also);
  Storage(const Storage&) = delete;

  // Fills the persistent tensors from their initializers; normal values depend on seed and name only.
  void initialize(uint64_t seed, Threads& threads);
  void initialize(const Tensor& tensor, uint64_t seed, Threads& threads);

  // A persistent tensor's memory, on the NVMe tier a StorageSlot*; null when there is none of that name.
  void* persistent(std::string_view name) const;
  // Gives a scalar (Builder::scalar) its value for the next step. An Error for any other name, but for those step
  // scalars of the engine (stages.h) that the program does not read.
  void set_scalar(std::string_view name, double value);
  const std::vector<Tensor>& persistent_tensors() const { return tensors_; }
  // Between steps only: a persistent tensor's bytes wherever it rests. What is not in memory that this process can
  // address comes and goes in pieces of at most kPiece bytes, so that nothing takes memory that no plan knows.
  using Take = std::function<void(std::span<const std::byte>)>;
  void each(const Tensor& tensor, const Take& take);
  // Calls write(memory, first, count) for elements [first, first + count) after each other.
  using Write = std::function<void(void* memory, int64_t first, int64_t count)>;
  void fill(const Tensor& tensor, const Write& write);
  // A copy of the whole tensor: for tests and tools.
  std::vector<std::byte> copy(const Tensor& tensor);
  static constexpr int64_t kPiece = 4 << 20;
  void release_piece() { piece_ = Arena(); }
  // An executor holds the storage while ops of its last step go on: tensors are for nobody else then, nor does another
  // executor run. Null: nobody holds it.
  void hold(const void* executor) { holder_ = executor; }
  const void* holder() const { return holder_; }

  // Start of a tier's arena in RAM, and of its transient region.
  std::byte* base(Tier tier) const { return bases_[int(tier)]; }
  std::byte* transient(Tier tier) const { return base(tier) + persistent_bytes_[int(tier)]; }
  int64_t bytes(Tier tier) const { return bytes_[int(tier)]; }
  int64_t persistent_bytes(Tier tier) const { return persistent_bytes_[int(tier)]; }
  // Memory that the host and the device can read and write at any time, zero at first; lives as long as this.
  std::byte* shared_memory(int64_t bytes);
  // Whether a persistent tensor lies there: scalars do, which the host sets and reads. On a device they have a place of
  // their own in its arena too, which is whoever's who copies there.
  static bool is_shared(const Tensor& tensor) { return tensor.dtype == DType::f64 && elements(tensor.shape) == 1; }
  void* device_copy(std::string_view name) const;  // that place; null without a device
  Device* device() const { return device_; }
  // A slot at an offset of the NVMe tier's transient region; lives as long as this.
  std::unique_ptr<StorageSlot> transient_slot(const Tensor& tensor, int64_t offset) const;
  // The same of the persistent region, for a part of a tensor.
  std::unique_ptr<StorageSlot> part_slot(const Tensor& tensor, int64_t offset) const;
  const std::string& note() const { return note_; }  // what is slower than it should be; usually nothing

 private:
  class Slot;
  struct Nvme {
    explicit Nvme(const NvmeStore::Options& options)
        : store(options), reading(store.channel()), writing(store.channel()) {}
    NvmeStore store;
    NvmeStore::Channel reading, writing;                       // of the streams read and write, which may run at once
    std::byte *device_begin = nullptr, *device_end = nullptr;  // the device's arena, when
    std::unique_ptr<DeviceFile> direct;                        // it moves bytes by itself
    bool is_direct(const void* memory) const { return memory >= device_begin && memory < device_end; }
  };
  bool away(const Tensor& tensor) const;  // in a device's memory
  std::byte* piece();

  std::vector<Tensor> tensors_;
  std::map<std::string, void*, std::less<>> places_, device_copies_;
  std::vector<std::unique_ptr<StorageSlot>> slots_;
  std::array<int64_t, kTiers> persistent_bytes_{}, bytes_{};
  std::array<Arena, kTiers> arenas_;
  std::array<std::byte*, kTiers> bases_{};
  Device* device_;
  std::vector<std::byte*> shared_;  // of the device
  std::vector<Arena> shared_arenas_;
  std::unique_ptr<Nvme> nvme_;
  std::string note_;
  const void* holder_ = nullptr;
  Arena piece_;  // what moves between NVMe or the device and host memory, at start, load and save
};

}  // namespace strata
