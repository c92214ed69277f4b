// Staging: plain copies of each leaf's bytes, clipped to the window.
#include "engine/stage.h"

#include <algorithm>
#include <cstring>

namespace tdcopier {
namespace {

void prefetch_beginning(const Leaf& leaf) {
  constexpr uint64_t kLine = 64;
  const auto* bytes = static_cast<const std::byte*>(leaf.data);
  for (uint64_t at = 0; at < std::min<uint64_t>(leaf.bytes, 4 * kLine); at += kLine) {
    __builtin_prefetch(bytes + at);
  }
}

}  // namespace

std::vector<Window> cut_windows(const PackPlan& plan, uint64_t max_window_bytes) {
  std::vector<Window> windows;
  for (uint32_t chunk = 0; chunk < plan.chunks.size(); ++chunk) {
    const uint64_t bytes = plan.chunks[chunk].bytes;
    for (uint64_t begin = 0; begin < bytes; begin += max_window_bytes) {
      windows.push_back({chunk, begin, std::min(bytes, begin + max_window_bytes)});
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
    if (last - at > kAhead) prefetch_beginning(leaves[at[kAhead]]);
    const Leaf& leaf = leaves[*at];
    if (leaf.bytes == 0) continue;
    const uint64_t offset = plan.slots[*at].offset;
    const uint64_t begin = std::max(offset, window.begin);
    const uint64_t end = std::min(offset + leaf.bytes, window.end);
    std::memcpy(staging + (begin - window.begin),
                static_cast<const std::byte*>(leaf.data) + (begin - offset), end - begin);
  }
}

}  // namespace tdcopier
