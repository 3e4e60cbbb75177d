// Options rendered for people (a table) and for editors (JSON schema), both from the one declaration.
#pragma once
#include <string>
#include <vector>

#include "strata/options.h"

namespace strata {

std::string options_text(const Options& options);
// JSON schema (draft 2020-12) of a whole configuration with all plugins that can be found.
std::string json_schema(const std::vector<std::string>& plugin_folders);

}  // namespace strata
