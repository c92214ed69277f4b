// Cuts the chunks of a pack plan into windows, one transfer each, and fills staging memory with
// them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/pack_plan.h"
#include "base/strided_copy.h"
#include "engine/leaf.h"

namespace tdcopier {

// Bytes [begin, end) of one chunk.
struct Window {
  uint32_t chunk;
  uint64_t begin;
  uint64_t end;
};

// Bytes [begin, end) of a leaf as they arrive.
struct LeafRange {
  uint64_t begin;
  uint64_t end;
};

// A chunk with strided leaves is cut into windows of this size: to read them takes so much longer
// that it is worth more hands.
inline constexpr uint64_t kStridedWindowBytes = 1024 * 1024;

// How large the windows of a job are: the first ones small, so that the device has something to do
// soon, and twice as large for each round of them, until they are as large as they may be.
struct WindowBytes {
  uint64_t first;
  uint64_t most;

  static WindowBytes all(uint64_t bytes) { return {bytes, bytes}; }
};

// What is best for so many bytes and hands: small enough that each hand has its share, and large
// enough that a transfer's own cost does not matter.
WindowBytes balanced_window_bytes(uint64_t total_bytes, size_t hands, uint64_t most_bytes);

// Another bound for all windows, for tests that want many of them for little. Thread: any.
void set_max_window_bytes(uint64_t bytes);

// Windows that cover every chunk, in the plan's order; those of full size in one chunk are about
// equal.
std::vector<Window> cut_windows(const PackPlan& plan, const LeafTable& leaves,
                                WindowBytes window_bytes);

// Writes the window's share of each leaf to where it belongs in `staging`, which holds the window's
// bytes. Bytes between slots are left as they are.
void stage_window(const PackPlan& plan, const LeafTable& leaves, const Window& window,
                  std::byte* staging);

// Writes a leaf's bytes, as they arrive, to `to`.
void stage_leaf(const LeafTable& leaves, const Leaf& leaf, LeafRange range, std::byte* to);

// The leaf's dimensions in the order in which its bytes arrive, joined, for memory with these
// strides.
std::vector<StridedDim> dims_as_they_arrive(const LeafTable& leaves, const Leaf& leaf,
                                            std::span<const int64_t> strides_bytes);

// Calls visit(leaf, range, place in the window) for each leaf that has bytes in the window.
template <typename Visit>
void for_each_in_window(const PackPlan& plan, const LeafTable& leaves, const Window& window,
                        const Visit& visit) {
  const ChunkPlan& chunk = plan.chunks[window.chunk];
  const auto first = plan.order.begin() + chunk.first;
  const auto last = plan.order.begin() + chunk.last;
  // The first leaf that ends behind the window's beginning; offsets ascend within a chunk.
  auto at = std::partition_point(first, last, [&](uint32_t leaf) {
    return plan.slots[leaf].offset + leaves[leaf].bytes <= window.begin;
  });
  for (; at != last && plan.slots[*at].offset < window.end; ++at) {
    if (leaves[*at].bytes == 0) continue;
    const uint64_t offset = plan.slots[*at].offset;
    const uint64_t begin = std::max(offset, window.begin);
    const uint64_t end = std::min(offset + leaves[*at].bytes, window.end);
    visit(*at, LeafRange{begin - offset, end - offset}, begin - window.begin);
  }
}

}  // namespace tdcopier
