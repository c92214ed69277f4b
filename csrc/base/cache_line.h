// The processor's cache lines, and how to fetch them ahead of their use.
#pragma once

#include <atomic>
#include <cstddef>
#include <limits>

namespace tdcopier {

inline constexpr size_t kLineBytes = 64;

enum class Use : int { kRead = 0, kWrite = 1 };

// Whether walks and staging prefetch. Turned off for comparisons only. Thread: any.
inline std::atomic<bool> g_prefetching = true;

inline bool is_prefetching() {
  return g_prefetching.load(std::memory_order_relaxed);
}

// Returns how many elements ahead to prefetch: `distance`, or more than any loop has elements. Call
// it before the loop.
inline size_t prefetch_distance(size_t distance) {
  return is_prefetching() ? distance : std::numeric_limits<size_t>::max() / 2;
}

// Functions that do nothing but prefetch are always inlined: GCC takes them for functions without
// an effect, and drops calls of them that it has not inlined yet.
#define TDCOPIER_PREFETCH [[gnu::always_inline]] inline

// Fetches the lines that hold `bytes` bytes from `begin` on. May be given any address.
template <Use kUse = Use::kRead>
TDCOPIER_PREFETCH void prefetch_lines(const void* begin, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kLineBytes) {
    __builtin_prefetch(static_cast<const char*>(begin) + at, static_cast<int>(kUse));
  }
}

}  // namespace tdcopier
