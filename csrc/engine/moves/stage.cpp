// Copies each leaf's bytes to staging memory, clipped to the window.
#include "engine/moves/stage.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/cache_line.h"
#include "base/pack_plan.h"
#include "base/row_copy.h"
#include "base/strided_copy.h"

namespace tdcopier {
namespace {

std::atomic<uint64_t> g_max_window_bytes = std::numeric_limits<uint64_t>::max();

constexpr uint64_t kPageBytes = 4096;

// Contiguous pieces from this size on are written past the caches. Otherwise the first bytes would
// be evicted before the device reads the last ones, or the device would have to fetch all of them
// from the caches, which is slower.
constexpr uint64_t kStreamedBytes = 64 * 1024;

// Returns a step of at most `most` that covers the bytes in as few steps, with a last one that is
// not much smaller.
uint64_t even_step(uint64_t bytes, uint64_t most) {
  if (bytes <= most || most < 16 * kPageBytes) return most;
  const uint64_t steps = (bytes + most - 1) / most;
  return std::min(most, align_up((bytes + steps - 1) / steps, kPageBytes));
}

TDCOPIER_PREFETCH void prefetch_beginning(const Leaf& leaf) {
  prefetch_lines(leaf.data, std::min<uint64_t>(leaf.bytes, 4 * kLineBytes));
}

// Reads a strided leaf in the order in which its output is stored. Windows and slots begin at
// multiples of the element's size, so no element is cut.
void stage_strided(const LeafTable& leaves, const Leaf& leaf, LeafRange range, std::byte* to) {
  const std::vector<StridedDim> dims =
      dims_as_they_arrive(leaves, leaf, leaves.source_strides_bytes(leaf));
  const auto element_bytes = static_cast<uint32_t>(c10::elementSize(leaf.dtype));
  copy_strided(static_cast<const std::byte*>(leaf.data), dims, element_bytes,
               range.begin / element_bytes, range.end / element_bytes, to);
}

// Rows do not count: they are read whole, which takes no longer.
bool has_strided(const PackPlan& plan, const LeafTable& leaves, const ChunkPlan& chunk) {
  return std::any_of(
      plan.order.begin() + chunk.first, plan.order.begin() + chunk.last,
      [&](uint32_t leaf) { return leaves[leaf].strided && !leaves[leaf].is_rows(); });
}

}  // namespace

void stage_leaf(const LeafTable& leaves, const Leaf& leaf, LeafRange range, std::byte* to) {
  if (leaf.is_rows()) {
    gather_rows(static_cast<const std::byte*>(leaf.data), leaves.row_layout(leaf), leaves.rows(),
                range.begin, range.end, to);
  } else if (leaf.strided) {
    stage_strided(leaves, leaf, range, to);
  } else {
    std::memcpy(to, static_cast<const std::byte*>(leaf.data) + range.begin,
                range.end - range.begin);
  }
}

std::vector<StridedDim> dims_as_they_arrive(const LeafTable& leaves, const Leaf& leaf,
                                            std::span<const int64_t> strides_bytes) {
  const at::IntArrayRef sizes = leaves.sizes(leaf);
  const at::IntArrayRef strides = leaves.strides(leaf);
  std::vector<size_t> outermost_first(leaf.dims);
  std::iota(outermost_first.begin(), outermost_first.end(), size_t{0});
  std::sort(outermost_first.begin(), outermost_first.end(),
            [&](size_t a, size_t b) { return strides[a] > strides[b]; });
  std::vector<StridedDim> dims;
  for (const size_t d : outermost_first) dims.push_back({sizes[d], strides_bytes[d]});
  dims.resize(join_dims(dims));
  return dims;
}

void set_max_window_bytes(uint64_t bytes) {
  g_max_window_bytes = bytes;
}

std::vector<Window> cut_windows(const PackPlan& plan, const LeafTable& leaves,
                                WindowBytes window_bytes,
                                const std::function<bool(const ChunkPlan&)>& is_staged) {
  constexpr size_t kWindowsOfRound = 8;
  std::vector<Window> windows;
  uint64_t first_bytes = window_bytes.most;
  if (window_bytes.grow) {
    uint64_t staged_bytes = 0;
    for (const ChunkPlan& chunk : plan.chunks) staged_bytes += is_staged(chunk) ? chunk.bytes : 0;
    first_bytes = staged_bytes < kManyStagedBytes ? kFirstWindowBytes : kLargeFirstWindowBytes;
  }
  const auto cut = [&](Window all, uint64_t most) {
    const uint64_t step = even_step(all.bytes(), most);
    while (all.begin < all.end) {
      const size_t round = std::min<size_t>(windows.size() / kWindowsOfRound, 32);
      const uint64_t here = std::min(step, first_bytes << round);
      // Windows end at cache lines. Chunks have the same offset in a line as on the target, so no
      // element is cut.
      const uint64_t line = (all.begin + here) / kLineBytes * kLineBytes;
      windows.push_back(
          {all.begin, std::min(all.end, line > all.begin ? line : line + kLineBytes)});
      all.begin = windows.back().end;
    }
  };
  const uint64_t most = std::min<uint64_t>(window_bytes.most, g_max_window_bytes);
  for (size_t i = 0; i < plan.chunks.size();) {
    const ChunkPlan& first = plan.chunks[i++];
    if (!is_staged(first)) continue;
    Window all{first.begin, first.end()};
    bool strided = has_strided(plan, leaves, first);
    const auto goes_on = [&] {
      return i < plan.chunks.size() && first.packed && plan.chunks[i].packed &&
             is_staged(plan.chunks[i]);
    };
    for (; goes_on(); ++i) {
      all.end = plan.chunks[i].end();
      strided = strided || has_strided(plan, leaves, plan.chunks[i]);
    }
    const bool in_small_parts = strided && all.bytes() > kStridedWindowBytes;
    cut(all, in_small_parts ? std::min(most, kStridedWindowBytes) : most);
  }
  return windows;
}

void stage_window(const PackPlan& plan, const LeafTable& leaves, const Window& window,
                  std::byte* staging, StoreTo store) {
  constexpr uint32_t kAhead = 8;  // small leaves are far apart: prefetch their first bytes
  const auto stage_chunk = [&](size_t index, uint64_t from, uint64_t to, uint64_t place) {
    const ChunkPlan& chunk = plan.chunks[index];
    std::byte* const here = staging + place;
    for (uint32_t i = first_leaf_after(plan, leaves, chunk, from); i < chunk.last; ++i) {
      if (chunk.last - i > kAhead && !leaves[plan.order[i + kAhead]].is_rows()) {
        prefetch_beginning(leaves[plan.order[i + kAhead]]);
      }
      const Leaf& leaf = leaves[plan.order[i]];
      const uint64_t offset = plan.slots[plan.order[i]].offset;
      if (offset >= to) break;
      if (leaf.bytes == 0) continue;
      const uint64_t begin = std::max(offset, from);
      const uint64_t end = std::min(offset + leaf.bytes, to);
      const LeafRange range{begin - offset, end - offset};
      if (leaf.strided || end - begin < kStreamedBytes) {
        stage_leaf(leaves, leaf, range, here + (begin - from));
      } else {
        copy_streaming(here + (begin - from),
                       static_cast<const std::byte*>(leaf.data) + range.begin, end - begin, store);
      }
    }
  };
  for_each_chunk_in_window(plan, window, stage_chunk);
}

}  // namespace tdcopier
