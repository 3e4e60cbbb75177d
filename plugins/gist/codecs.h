// The encodings as op kinds, in pairs gist_NAME_encode and gist_NAME_decode.
#pragma once
#include "strata/builder.h"

namespace strata::gist {

// Registers the kinds; calls after the first do nothing.
void register_kinds();

// A shape as attributes of a decoder, whose inputs do not tell it.
Attributes shape_attributes(const Shape& shape);

}  // namespace strata::gist
