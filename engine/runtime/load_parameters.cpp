// See load_parameters.h.
#include "engine/runtime/load_parameters.h"

#include "engine/checkpoint/store.h"
#include "engine/runtime/same_model.h"
#include "engine/runtime/saver.h"

namespace strata {

void load_parameters(Storage& storage, const Session& session, const std::string& checkpoint) {
  const Checkpoint source(checkpoint);
  require_same_model(session.config, source.info().config, checkpoint, session.run.plugin_path);
  for (const Tensor& tensor : storage.persistent_tensors())
    if (tensor.role == Role::parameter && is_in(source, tensor))
      storage.fill(tensor,
                   [&](void* out, int64_t first, int64_t count) { read_into(source, tensor, out, first, count); });
  storage.release_piece();
}

}  // namespace strata
