// Counts operations that took a slower path because the fast one was unavailable:
// `stats.fallbacks`, of which tdcopier/_stats.py has the list. Noted by what calls note_fallback():
// in this folder the events, run-ahead and staging; in engine/moves the transfers and the gathers;
// in engine/jobs host_to_device_job.cpp and into_host_job.cpp (where they transfer without staging
// or in place after all), and route.cpp (where no result can be pinned). Such code serves many
// copies, so each thread points to the count of the copy that it works on. Tables whose rows are
// read by their own code are added in python/handle/handle.cpp.
#pragma once

#include <c10/core/DeviceType.h>

#include <atomic>
#include <cstdint>
#include <utility>

namespace tdcopier {

using FallbackCount = std::atomic<uint64_t>;

// While it exists, the fallbacks that this thread notes are added to `count`.
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

// Notes a fallback on any device, for example to pageable memory because pinning failed.
inline void note_fallback() {
  CountFallbacks::note();
}

// Notes that a gather, scatter or transfer on a device of this type fell back to torch. Counts
// nothing except on CUDA: other types have no fast path.
inline void note_fallback(c10::DeviceType type) {
  if (type == c10::DeviceType::CUDA) note_fallback();
}

}  // namespace tdcopier
