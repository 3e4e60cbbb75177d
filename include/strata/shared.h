// Values that many copies have in common: what unrolling makes for one microbatch is like that of every other, and a
// program has millions of tensors and ops. Copying one copies a pointer; it is read like the value and changed by being
// given another.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace strata {

// A value that its copies share and none of them changes. Without one: T().
template <class T>
class Shared {
 public:
  Shared() = default;
  Shared(T value) : held_(new Held{std::move(value)}) {}
  Shared(const Shared& other) noexcept : held_(other.held_) {
    if (held_) held_->owners.fetch_add(1, std::memory_order_relaxed);
  }
  Shared(Shared&& other) noexcept : held_(std::exchange(other.held_, nullptr)) {}
  Shared& operator=(Shared other) noexcept {
    std::swap(held_, other.held_);
    return *this;
  }
  ~Shared() {
    if (held_ && held_->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete held_;
  }
  const T& operator*() const {
    static const T none{};
    return held_ ? held_->value : none;
  }
  const T* operator->() const { return &**this; }
  // Gives this copy alone another value: what `edit` makes of the one it has.
  template <class Edit>
  void change(Edit&& edit) {
    T value = **this;
    edit(value);
    *this = std::move(value);
  }
  // One value, not only an equal one: the same for the copies of an op or tensor.
  bool is_same(const Shared& other) const { return held_ == other.held_; }

 private:
  struct Held {
    T value;
    std::atomic<uint32_t> owners{1};
  };
  Held* held_ = nullptr;
};

// The same of a list, which is read like a vector.
template <class T>
class SharedVector {
 public:
  using value_type = T;
  using const_iterator = typename std::vector<T>::const_iterator;
  using iterator = const_iterator;

  SharedVector() = default;
  SharedVector(std::vector<T> list) : list_(list.empty() ? Shared<std::vector<T>>() : std::move(list)) {}
  SharedVector(std::initializer_list<T> list) : SharedVector(std::vector<T>(list)) {}
  operator const std::vector<T>&() const { return *list_; }
  const std::vector<T>& operator*() const { return *list_; }

  size_t size() const { return list_->size(); }
  bool empty() const { return list_->empty(); }
  const_iterator begin() const { return list_->begin(); }
  const_iterator end() const { return list_->end(); }
  const T& operator[](size_t i) const { return (*list_)[i]; }
  const T& at(size_t i) const { return list_->at(i); }
  const T& front() const { return list_->front(); }
  const T& back() const { return list_->back(); }
  bool is_same(const SharedVector& other) const { return list_.is_same(other.list_); }

  void push_back(T value) {  // for this copy alone
    std::vector<T> longer = *list_;
    longer.push_back(std::move(value));
    list_ = std::move(longer);
  }
  friend bool operator==(const SharedVector& a, const SharedVector& b) { return a.is_same(b) || *a == *b; }
  friend bool operator==(const SharedVector& a, const std::vector<T>& b) { return *a == b; }

 private:
  Shared<std::vector<T>> list_;
};

// The name of a tensor. What unrolling and residency make in great numbers is named after what it is a copy of:
// "name@3" in microbatch 3, "name#17" for another copy of a tensor. Such names share what is before the mark and are
// put together when somebody asks.
class Name {
 public:
  Name() = default;
  Name(std::string text) : base_(std::move(text)) {}
  Name(std::string_view text) : Name(std::string(text)) {}
  Name(const char* text) : Name(std::string(text)) {}
  std::string text() const;
  operator std::string() const { return text(); }
  bool empty() const { return base_->empty(); }

  Name of_microbatch(int32_t microbatch) const;
  Name of_copy(int32_t number) const;
  bool is(std::string_view other) const;
  // Whether it ends like one of a microbatch, put together or not.
  bool is_of_microbatch() const;

  friend bool operator==(const Name& a, const Name& b) {
    return a.base_.is_same(b.base_) ? a.microbatch_ == b.microbatch_ && a.copy_ == b.copy_ : a.text() == b.text();
  }
  // Defined here, so that only a Name finds it, and no text becomes one to be compared.
  friend bool operator==(const Name& a, std::string_view b) { return a.is(b); }
  friend bool operator==(const Name& a, const std::string& b) { return a == std::string_view(b); }
  friend bool operator==(const Name& a, const char* b) { return a == std::string_view(b); }
  friend std::string operator+(const Name& a, std::string_view b) { return a.text().append(b); }
  friend std::string operator+(std::string_view a, const Name& b) { return std::string(a) += b.text(); }
  friend std::ostream& operator<<(std::ostream& out, const Name& name);

 private:
  static constexpr int32_t kNone = -1;
  Shared<std::string> base_;
  int32_t microbatch_ = kNone, copy_ = kNone;
};

}  // namespace strata
