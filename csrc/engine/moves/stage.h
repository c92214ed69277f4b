// Fills staging memory with windows of a pack plan's image.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/pack_plan.h"
#include "base/streaming_copy.h"
#include "base/strided_copy.h"
#include "engine/leaves/leaf.h"
#include "engine/moves/windows.h"

namespace tdcopier {

// Bytes [begin, end) of a leaf as they arrive.
struct LeafRange {
  uint64_t begin;
  uint64_t end;
};

// Writes the window's part of each leaf to its place in `staging`, which holds the window's bytes.
// Bytes between slots are not written. `store`: where contiguous pieces go, except small ones.
void stage_window(const PackPlan& plan, const LeafTable& leaves, const Window& window,
                  std::byte* staging, StoreTo store = StoreTo::kMemory);

// Writes the bytes `range` of a leaf, as they arrive, to `to`.
void stage_leaf(const LeafTable& leaves, const Leaf& leaf, LeafRange range, std::byte* to);

// Returns the dimensions of memory with these strides, in the order in which the leaf's bytes
// arrive. Adjoining dimensions are joined.
std::vector<StridedDim> dims_as_they_arrive(const LeafTable& leaves, const Leaf& leaf,
                                            std::span<const int64_t> strides_bytes);

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
