// Staging: plain copies of each leaf's bytes, clipped to the window.
#include "engine/stage.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/row_copy.h"
#include "base/streaming_copy.h"
#include "base/strided_copy.h"

namespace tdcopier {
namespace {

std::atomic<uint64_t> g_max_window_bytes = std::numeric_limits<uint64_t>::max();

constexpr uint64_t kPageBytes = 4096;

// Of so many bytes that lie together the device reads the last ones when the first have long left
// the caches, or has to fetch them all from there.
constexpr uint64_t kStreamedBytes = 64 * 1024;

uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// At most `most`, so that as many steps cover the bytes, and the last is not much smaller.
uint64_t even_step(uint64_t bytes, uint64_t most) {
  if (bytes <= most || most < 16 * kPageBytes) return most;
  const uint64_t steps = (bytes + most - 1) / most;
  return std::min(most, align_up((bytes + steps - 1) / steps, kPageBytes));
}

void prefetch_beginning(const Leaf& leaf) {
  constexpr uint64_t kLine = 64;
  const auto* bytes = static_cast<const std::byte*>(leaf.data);
  for (uint64_t at = 0; at < std::min<uint64_t>(leaf.bytes, 4 * kLine); at += kLine) {
    __builtin_prefetch(bytes + at);
  }
}

// A strided leaf is read in the order in which its output lies in memory. Windows and slots begin
// at multiples of the element's size, so no element is cut.
void stage_strided(const LeafTable& leaves, const Leaf& leaf, LeafRange range, std::byte* to) {
  const std::vector<StridedDim> dims =
      dims_as_they_arrive(leaves, leaf, leaves.source_strides_bytes(leaf));
  const auto element_bytes = static_cast<uint32_t>(c10::elementSize(leaf.dtype));
  copy_strided(static_cast<const std::byte*>(leaf.data), dims, element_bytes,
               range.begin / element_bytes, range.end / element_bytes, to);
}

// Rows are read a whole one at a time, which does not take longer.
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

WindowBytes balanced_window_bytes(uint64_t total_bytes, size_t hands, uint64_t most_bytes) {
  constexpr uint64_t kWindowsOfHand = 2;
  constexpr uint64_t kFirstBytes = 256 * 1024;
  constexpr uint64_t kLeastBytes = 2 * 1024 * 1024;
  // A pool may have got no thread at all: then the caller is the one hand.
  const uint64_t share = total_bytes / (kWindowsOfHand * std::max<size_t>(hands, 1));
  const uint64_t most =
      std::clamp(align_up(share, kPageBytes), std::min(kLeastBytes, most_bytes), most_bytes);
  return {std::min(kFirstBytes, most), most};
}

std::vector<Window> cut_windows(const PackPlan& plan, const LeafTable& leaves,
                                WindowBytes window_bytes) {
  constexpr size_t kWindowsOfRound = 8;
  std::vector<Window> windows;
  for (uint32_t chunk = 0; chunk < plan.chunks.size(); ++chunk) {
    const uint64_t bytes = plan.chunks[chunk].bytes;
    uint64_t step = std::min<uint64_t>(window_bytes.most, g_max_window_bytes);
    if (bytes > kStridedWindowBytes && has_strided(plan, leaves, plan.chunks[chunk])) {
      step = std::min(step, kStridedWindowBytes);
    }
    step = even_step(bytes, step);
    for (uint64_t begin = 0; begin < bytes; begin = windows.back().end) {
      const size_t round = std::min<size_t>(windows.size() / kWindowsOfRound, 32);
      const uint64_t here = std::min(step, window_bytes.first << round);
      windows.push_back({chunk, begin, std::min(bytes, begin + here)});
    }
  }
  return windows;
}

void stage_window(const PackPlan& plan, const LeafTable& leaves, const Window& window,
                  std::byte* staging) {
  const ChunkPlan& chunk = plan.chunks[window.chunk];
  const auto first = plan.order.begin() + chunk.first;
  const auto last = plan.order.begin() + chunk.last;
  // The first leaf that ends behind the window's beginning; offsets ascend within a chunk.
  auto at = std::partition_point(first, last, [&](uint32_t leaf) {
    return plan.slots[leaf].offset + leaves[leaf].bytes <= window.begin;
  });
  constexpr ptrdiff_t kAhead = 8;  // small leaves lie scattered: fetch their first bytes early
  for (; at != last && plan.slots[*at].offset < window.end; ++at) {
    if (last - at > kAhead && !leaves[at[kAhead]].is_rows()) {
      prefetch_beginning(leaves[at[kAhead]]);
    }
    const Leaf& leaf = leaves[*at];
    if (leaf.bytes == 0) continue;
    const uint64_t offset = plan.slots[*at].offset;
    const uint64_t begin = std::max(offset, window.begin);
    const uint64_t end = std::min(offset + leaf.bytes, window.end);
    const LeafRange range{begin - offset, end - offset};
    std::byte* const to = staging + (begin - window.begin);
    if (leaf.strided || end - begin < kStreamedBytes) {
      stage_leaf(leaves, leaf, range, to);
    } else {
      copy_streaming(to, static_cast<const std::byte*>(leaf.data) + range.begin, end - begin);
    }
  }
}

}  // namespace tdcopier
