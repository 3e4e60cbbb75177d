// Options rendered for people (a table, a reference page) and for editors (JSON schema), all from the one declaration.
#pragma once
#include <string>
#include <vector>

#include "strata/options.h"

namespace strata {

std::string options_text(const Options& options);
// JSON schema (draft 2020-12) of a whole configuration with all plugins that can be found.
std::string json_schema(const std::vector<std::string>& plugin_folders);
// The reference of all tables and of all plugins that can be found: docs/options.md.
std::string options_markdown(const std::vector<std::string>& plugin_folders);

}  // namespace strata
