// Elementwise reduction of several arrays in a balanced tree.
#pragma once
#include <cstdint>
#include <span>

#include "strata/communicator.h"

namespace strata {

// out = in[0] ∘ in[1] ∘ … over `bytes` bytes, paired ((0 1)(2 3))…; the tree splits at the largest power of two below
// the number of inputs. `out` may be one of the inputs. At most 1024 inputs. 16 bits are summed in f32 and
// rounded once, or with `rounds_each` after each addition, so that the result is that of a program that adds tensors.
void reduce_tree(std::span<const std::byte* const> in, std::byte* out, int64_t bytes, DType dtype, Reduction reduction,
                 bool rounds_each = false);

// Where the tree splits `count` leaves: the largest power of two below it.
int tree_split(int count);

}  // namespace strata
