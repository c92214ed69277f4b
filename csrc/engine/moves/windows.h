// The windows of a job: the sizes to choose from, of which engine/jobs/route.cpp chooses, and how
// the chunks of a pack plan are cut into them, and windows into the parts that participants claim.
// A window that is staged fits in a staging buffer, of kStagingBufferBytes (2 MiB); files that are
// mapped are read in kMappedWindowBytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/pack_plan.h"

namespace tdcopier {

// Bytes [begin, end) of a plan's image.
struct Window {
  uint64_t begin;
  uint64_t end;

  uint64_t bytes() const { return end - begin; }
};

// The most bytes that a participant copies at a time within the host.
inline constexpr uint64_t kHostWindowBytes = 1024 * 1024;

// The smallest windows where each worker gets one. Those of deferred batches are larger: no thread
// waits for such a batch, and more workers would only slow down the loop's own thread.
inline constexpr uint64_t kLeastWindowBytes = 64 * 1024;
inline constexpr uint64_t kLeastDeferredWindowBytes = 512 * 1024;

// The sizes of a job's windows: all have up to `most` bytes; or the first is small, so that the
// device starts early, and each is at most as large as all before it; the last ones are smaller
// again, since nothing is staged any more while the device reads the last.
struct WindowBytes {
  uint64_t most;
  bool grow;

  static WindowBytes all(uint64_t bytes) { return {bytes, false}; }
  static WindowBytes growing(uint64_t most) { return {most, true}; }
};

// The first window of windows that grow. The device is idle until it is staged. It cannot be
// smaller, since each transfer takes the device 2.6 us beside its bytes (H200; events and a second
// stream change nothing), in which the link could send 140 KB.
inline constexpr uint64_t kFirstWindowBytes = 256 * 1024;
// Of those, the last ones are not smaller than this.
inline constexpr uint64_t kLastWindowBytes = 1024 * 1024;

// Bounds the size of all windows, for tests that need many windows for little data. Thread: any.
void set_max_window_bytes(uint64_t bytes);

// Returns windows that cover the chunks for which `is_staged`, in the plan's order. Consecutive
// packed chunks share windows; windows of full size in one chunk are about equal.
std::vector<Window> cut_windows(
    const PackPlan& plan, WindowBytes window_bytes,
    const std::function<bool(const ChunkPlan&)>& is_staged = [](const ChunkPlan&) { return true; });

// A part of a window that one participant stages.
struct WindowPart {
  size_t window;
  uint64_t begin;  // in the plan's image, as the end
  uint64_t end;
};

// Returns the parts of the windows, in their order: several of each, so that all participants
// stage the window that the device needs next. A single window that is small has one part.
std::vector<WindowPart> cut_parts(const std::vector<Window>& windows);

// Calls visit(chunk index, begin, end, offset in the window) for each chunk that has bytes in the
// window: its bytes [begin, end).
template <typename Visit>
void for_each_chunk_in_window(const PackPlan& plan, const Window& window, const Visit& visit) {
  auto chunk = std::partition_point(
      plan.chunks.begin(), plan.chunks.end(),
      [&window](const ChunkPlan& before) { return before.end() <= window.begin; });
  for (; chunk != plan.chunks.end() && chunk->begin < window.end; ++chunk) {
    const uint64_t begin = std::max(chunk->begin, window.begin);
    const uint64_t end = std::min(chunk->end(), window.end);
    if (begin == end) continue;
    visit(static_cast<size_t>(chunk - plan.chunks.begin()), begin - chunk->begin,
          end - chunk->begin, begin - window.begin);
  }
}

}  // namespace tdcopier
