// Names put together (strata/shared.h).
#include <ostream>

#include "strata/shared.h"

namespace strata {

std::string Name::text() const {
  std::string text = *base_;
  if (microbatch_ != kNone) text += '@' + std::to_string(microbatch_);
  if (copy_ != kNone) text += '#' + std::to_string(copy_);
  return text;
}

Name Name::of_microbatch(int32_t microbatch) const {
  Name name = microbatch_ == kNone && copy_ == kNone ? *this : Name(text());
  name.microbatch_ = microbatch;
  return name;
}

Name Name::of_copy(int32_t number) const {
  Name name = copy_ == kNone ? *this : Name(text());
  name.copy_ = number;
  return name;
}

bool Name::is_of_microbatch() const {
  if (microbatch_ != kNone || copy_ != kNone) return copy_ == kNone;
  const size_t at = base_->find_last_not_of("0123456789");
  return at != std::string::npos && at + 1 < base_->size() && (*base_)[at] == '@';
}

bool Name::is(std::string_view other) const {
  if (!other.starts_with(*base_)) return false;
  const std::string text = this->text();
  return std::string_view(text) == other;
}

std::ostream& operator<<(std::ostream& out, const Name& name) { return out << name.text(); }

}  // namespace strata
