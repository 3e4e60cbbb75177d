// What plugins add to a model, from files of another ecosystem: an adapter from which a new run begins.
#pragma once
#include <span>

#include "engine/plugin/order.h"
#include "engine/runtime/storage.h"

namespace strata {

// Fills the parameters that plugins with the capability "adds to the model" have added from the folders that they name
// (Plugin::addition_to_begin_with). `model` maps the model's own. Throws Error naming file and tensor where such a file
// does not fit.
void begin_with_additions(std::span<const NamedPlugin> plugins, const Plugin& model, Storage& storage);

}  // namespace strata
