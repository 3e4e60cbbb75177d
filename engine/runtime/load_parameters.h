// The parameters of a checkpoint in the memory of a program that uses them without training: generation, evaluation.
#pragma once
#include <string>

#include "engine/runtime/session.h"
#include "engine/runtime/storage.h"

namespace strata {

// `checkpoint`: a checkpoint's folder. Throws Error when it is damaged or of another model than the session's.
void load_parameters(Storage& storage, const Session& session, const std::string& checkpoint);

}  // namespace strata
