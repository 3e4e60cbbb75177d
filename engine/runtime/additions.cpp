// See additions.h.
#include "engine/runtime/additions.h"

#include <algorithm>
#include <map>
#include <memory>

#include "engine/checkpoint/external_import.h"
#include "strata/convert.h"
#include "strata/layout.h"

namespace strata {
namespace {

// Of the whole parameters, from which rows of theirs the files have.
std::map<std::string, Shape> shapes_of(const std::vector<ExternalTensor>& tensors) {
  std::map<std::string, Shape> shapes;
  for (const ExternalTensor& tensor : tensors)
    for (const ExternalTensor::Rows& rows : tensor.rows) {
      Shape& shape = shapes.try_emplace(rows.parameter, Shape{0, external_columns(tensor)}).first->second;
      shape[0] = std::max(shape[0], rows.to + rows.count);
    }
  return shapes;
}

void fill(Storage& storage, const std::string& parameter, const float* values) {
  for (const Tensor& tensor : storage.persistent_tensors()) {
    if (tensor.name != parameter && tensor.lasting->rounded_from != parameter &&
        tensor.lasting->stands_for != parameter)
      continue;
    const GlobalIndex index(tensor);
    storage.fill(tensor, [&](void* out, int64_t first, int64_t count) {
      index.runs(first, first + count, [&](int64_t local, int64_t global, int64_t run) {
        from_f32(tensor.dtype, values + global, at(out, tensor.dtype, local - first), run);
      });
    });
  }
}

void begin_with(const NamedPlugin& named, const std::string& folder, const Plugin& model, Storage& storage) {
  const auto addition = named.plugin->external_addition(model.external_tensors());
  if (!addition) throw Error("plugin \"" + named.name + "\" reads no files of other programs.");
  const ExternalFolder files(folder, addition->config_name, addition->tensors_name);
  named.plugin->check_addition(files.config(), folder + "/" + addition->config_name);
  const auto shapes = shapes_of(addition->tensors);
  const ExternalImport tensors(files, addition->tensors, shapes);
  for (const auto& [name, shape] : shapes) {
    const auto values = std::make_unique_for_overwrite<float[]>(size_t(elements(shape)));
    tensors.read(name, values.get());
    fill(storage, name, values.get());
  }
  storage.release_piece();
}

}  // namespace

void begin_with_additions(std::span<const NamedPlugin> plugins, const Plugin& model, Storage& storage) {
  for (const NamedPlugin& named : plugins)
    if (const std::string folder = named.plugin->addition_to_begin_with(); !folder.empty())
      begin_with(named, folder, model, storage);
}

}  // namespace strata
