// Storage and first values of persistent tensors; see storage.h.
#include "engine/runtime/storage.h"

#include <algorithm>
#include <cstring>

#include "strata/random.h"

namespace strata {

Storage::Storage(const Program& program, const MemoryPlan& plan, int64_t transient_bytes)
    : persistent_bytes_(plan.persistent_bytes),
      arena_(plan.persistent_bytes + std::max(plan.transient_bytes, transient_bytes)) {
  for (size_t i = 0; i < program.tensors.size(); ++i)
    if (program.tensors[i].persistent) {
      tensors_.push_back(program.tensors[i]);
      offsets_[program.tensors[i].name] = plan.persistent_offset[i];
    }
}

void* Storage::persistent(std::string_view name) const {
  const auto found = offsets_.find(name);
  return found == offsets_.end() ? nullptr : arena_.base() + found->second;
}

void Storage::initialize(uint64_t seed, Threads& threads) {
  for (const Tensor& tensor : tensors_) {
    void* data = persistent(tensor.name);
    const int64_t count = elements(tensor.shape);
    switch (tensor.initializer.kind) {
      case Initializer::Kind::zeros:
        std::memset(data, 0, size_t(tensor.bytes()));
        break;
      case Initializer::Kind::ones:
        STRATA_CHECK(tensor.dtype == DType::f32);
        std::fill_n(static_cast<float*>(data), count, 1.0f);
        break;
      case Initializer::Kind::normal:
        STRATA_CHECK(tensor.dtype == DType::f32);
        threads.split(count, 4096, [&](int64_t begin, int64_t end) {
          fill_normal(static_cast<float*>(data) + begin, begin, end - begin, tensor.initializer.standard_deviation,
                      seed, stream_of(tensor.name));
        });
        break;
    }
  }
}

}  // namespace strata
