// Cuts the chunks of a pack plan into windows, and fills staging memory with them. Whether the call
// or workers do that is decided in python/calls/start_copy.cpp and python/calls/copy_into.cpp
// (`at_once`).
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/pack_plan.h"
#include "base/streaming_copy.h"
#include "base/strided_copy.h"
#include "engine/leaves/leaf.h"

namespace tdcopier {

// Bytes [begin, end) of a plan's image.
struct Window {
  uint64_t begin;
  uint64_t end;

  uint64_t bytes() const { return end - begin; }
};

// Bytes [begin, end) of a leaf as they arrive.
struct LeafRange {
  uint64_t begin;
  uint64_t end;
};

// A chunk with strided leaves is cut into windows of this size: they take so long to read that more
// participants pay off.
inline constexpr uint64_t kStridedWindowBytes = 1024 * 1024;

// The sizes of a job's windows: all have up to `most` bytes; or they grow: the first ones are
// small, so that the device starts early, and each round of windows is twice as large as the one
// before.
struct WindowBytes {
  uint64_t most;
  bool grow;

  static WindowBytes all(uint64_t bytes) { return {bytes, false}; }
  static WindowBytes growing(uint64_t most) { return {most, true}; }
};

// The first window of jobs that stage fewer bytes than kManyStagedBytes, and of the others. The
// device is idle until it is staged, but each window costs the device 2.5 us beside its bytes. In
// larger jobs every one of 12 workers gets a window nevertheless.
inline constexpr uint64_t kFirstWindowBytes = 256 * 1024;
inline constexpr uint64_t kLargeFirstWindowBytes = 512 * 1024;
inline constexpr uint64_t kManyStagedBytes = 16 * kLargeFirstWindowBytes;

// Bounds the size of all windows, for tests that need many windows for little data. Thread: any.
void set_max_window_bytes(uint64_t bytes);

// Returns windows that cover the chunks for which `is_staged`, in the plan's order. Consecutive
// packed chunks share windows; windows of full size in one chunk are about equal.
std::vector<Window> cut_windows(
    const PackPlan& plan, const LeafTable& leaves, WindowBytes window_bytes,
    const std::function<bool(const ChunkPlan&)>& is_staged = [](const ChunkPlan&) { return true; });

// Writes the window's part of each leaf to its place in `staging`, which holds the window's bytes.
// Bytes between slots are not written. `store`: where large contiguous pieces go.
void stage_window(const PackPlan& plan, const LeafTable& leaves, const Window& window,
                  std::byte* staging, StoreTo store = StoreTo::kMemory);

// Writes the bytes `range` of a leaf, as they arrive, to `to`.
void stage_leaf(const LeafTable& leaves, const Leaf& leaf, LeafRange range, std::byte* to);

// Returns the dimensions of memory with these strides, in the order in which the leaf's bytes
// arrive. Adjoining dimensions are joined.
std::vector<StridedDim> dims_as_they_arrive(const LeafTable& leaves, const Leaf& leaf,
                                            std::span<const int64_t> strides_bytes);

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

// Returns the first leaf of the chunk that ends after byte `begin` of the chunk, as an index into
// plan.order.
inline uint32_t first_leaf_after(const PackPlan& plan, const LeafTable& leaves,
                                 const ChunkPlan& chunk, uint64_t begin) {
  const auto at = std::partition_point(
      plan.order.begin() + chunk.first, plan.order.begin() + chunk.last,
      [&](uint32_t leaf) { return plan.slots[leaf].offset + leaves[leaf].bytes <= begin; });
  return static_cast<uint32_t>(at - plan.order.begin());
}

// Calls visit(leaf, range, offset in the window) for each leaf that has bytes in the window.
template <typename Visit>
void for_each_in_window(const PackPlan& plan, const LeafTable& leaves, const Window& window,
                        const Visit& visit) {
  const auto in_chunk = [&](size_t index, uint64_t from, uint64_t to, uint64_t place) {
    const ChunkPlan& chunk = plan.chunks[index];
    for (uint32_t i = first_leaf_after(plan, leaves, chunk, from); i < chunk.last; ++i) {
      const uint32_t leaf = plan.order[i];
      const uint64_t offset = plan.slots[leaf].offset;
      if (offset >= to) break;
      if (leaves[leaf].bytes == 0) continue;
      const uint64_t begin = std::max(offset, from);
      const uint64_t end = std::min(offset + leaves[leaf].bytes, to);
      visit(leaf, LeafRange{begin - offset, end - offset}, place + (begin - from));
    }
  };
  for_each_chunk_in_window(plan, window, in_chunk);
}

}  // namespace tdcopier
