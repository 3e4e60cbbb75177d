// Whether a checkpoint is of the model that a configuration describes. Its tensors' names and shapes say too little:
// heads, the base of rotary positions or fewer layers do not show in them. So the tables are compared that the
// checkpoint was written under: [model], and plugins that provide the capability "changes the model", or "adds to the
// model" where the checkpoint was written with them: one of the model alone does for those.
#pragma once
#include <string>
#include <vector>

#include "engine/config/config.h"

namespace strata {

// `written_under`: the configuration in the checkpoint's manifest; one without a [model] table says nothing and is
// taken. Options are compared as they stand once the plugin has built its model, so that a default and the same value
// written out are equal. Throws Error naming the keys that differ, but for options that may_change (strata/options.h).
void require_same_model(const Config& config, const std::string& written_under, const std::string& checkpoint,
                        const std::vector<std::string>& plugin_folders);

}  // namespace strata
