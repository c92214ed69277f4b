// Cuts the chunks of a plan into windows of about equal size, or of growing size.
#include "engine/moves/windows.h"

#include <atomic>
#include <limits>

#include "base/cache_line.h"

namespace tdcopier {
namespace {

std::atomic<uint64_t> g_max_window_bytes = std::numeric_limits<uint64_t>::max();

constexpr uint64_t kPageBytes = 4096;

// Returns a step of at most `most` that covers the bytes in as few steps, with a last one that is
// not much smaller.
uint64_t even_step(uint64_t bytes, uint64_t most) {
  if (bytes <= most || most < 16 * kPageBytes) return most;
  const uint64_t steps = (bytes + most - 1) / most;
  return std::min(most, align_up((bytes + steps - 1) / steps, kPageBytes));
}

// Rows do not count: they are read whole, which takes no longer.
bool has_strided(const PackPlan& plan, const LeafTable& leaves, const ChunkPlan& chunk) {
  return std::any_of(
      plan.order.begin() + chunk.first, plan.order.begin() + chunk.last,
      [&](uint32_t leaf) { return leaves[leaf].strided && !leaves[leaf].is_rows(); });
}

}  // namespace

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

}  // namespace tdcopier
