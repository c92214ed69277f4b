// Counts operations that took a slower path because the fast one was unavailable.
#pragma once

#include <c10/core/DeviceType.h>

#include <atomic>
#include <cstdint>

namespace tdcopier {

using FallbackCount = std::atomic<uint64_t>;

// While it lives, what this thread notes is counted there.
class CountFallbacks {
 public:
  explicit CountFallbacks(FallbackCount& count);
  ~CountFallbacks();
  CountFallbacks(const CountFallbacks&) = delete;
  CountFallbacks& operator=(const CountFallbacks&) = delete;

 private:
  FallbackCount* const before_;
};

// One gather, scatter or transfer on a device of this type fell back to torch. Nothing is counted
// where there is no fast path at all: only CUDA has one.
void note_fallback(c10::DeviceType type);
// A fallback on any device: to pageable memory, for example, where pinning failed.
void note_fallback();

}  // namespace tdcopier
