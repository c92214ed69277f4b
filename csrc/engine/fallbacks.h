// Counts operations that took a slower path because the fast one was unavailable. What notes one
// serves many copies: the count of the copy that a thread is at work on is the thread's own.
#pragma once

#include <c10/core/DeviceType.h>

#include <atomic>
#include <cstdint>
#include <utility>

namespace tdcopier {

using FallbackCount = std::atomic<uint64_t>;

// While it lives, what this thread notes is counted there.
class CountFallbacks {
 public:
  explicit CountFallbacks(FallbackCount& count) : before_(std::exchange(current_, &count)) {}
  ~CountFallbacks() { current_ = before_; }
  CountFallbacks(const CountFallbacks&) = delete;
  CountFallbacks& operator=(const CountFallbacks&) = delete;

  static void note() {
    if (current_ != nullptr) ++*current_;
  }

 private:
  static inline constinit thread_local FallbackCount* current_ = nullptr;
  FallbackCount* const before_;
};

// A fallback on any device: to pageable memory, for example, where pinning failed.
inline void note_fallback() {
  CountFallbacks::note();
}

// One gather, scatter or transfer on a device of this type fell back to torch. Nothing is counted
// where there is no fast path at all: only CUDA has one.
inline void note_fallback(c10::DeviceType type) {
  if (type == c10::DeviceType::CUDA) note_fallback();
}

}  // namespace tdcopier
