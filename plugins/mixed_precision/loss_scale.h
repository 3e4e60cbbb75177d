// Dynamic loss scaling as op kinds: whether a gradient overflowed, and what the scale is next (Micikevicius et al.,
// arXiv 1710.03740, section 3.2; the rule of growth and back-off is that of torch.amp.GradScaler).
#pragma once

namespace strata::mixed_precision {

// Registers the kinds `overflowed`, `any_overflowed` and `next_loss_scale`; calls after the first do nothing.
void register_loss_scale_kinds();

}  // namespace strata::mixed_precision
