// Tells those who wait that something has changed, and they look what.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>

#include "base/monitor.h"

namespace tdcopier {

// Thread: any. Who waits asks for the count first, then looks, and then waits for a later one.
class Bell {
 public:
  uint64_t count() {
    const std::lock_guard lock(mutex_);
    return count_;
  }

  void ring() noexcept {
    const std::lock_guard lock(mutex_);
    ++count_;
    rung_.notify_all();
  }

  // Blocks: until the count is another one, or `longest` has passed, which a deterministic schedule
  // ignores. Throws Interrupted, as waits do.
  void wait(uint64_t seen, std::chrono::milliseconds longest) {
    const auto end = std::chrono::steady_clock::now() + longest;
    std::unique_lock lock(mutex_);
    while (count_ == seen) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
      if (left.count() <= 0 && !is_interleaved()) return;
      rung_.wait_for(lock, std::clamp(left, kShortest, kLongest));
    }
  }

 private:
  // An interrupt is noticed between two of these.
  static constexpr std::chrono::milliseconds kShortest{1}, kLongest{20};

  Mutex mutex_;
  Condition rung_;
  uint64_t count_ = 0;  // guarded by mutex_
};

}  // namespace tdcopier
