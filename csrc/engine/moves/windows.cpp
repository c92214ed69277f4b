// Cuts the chunks of a plan into windows of about equal size, or of growing size, and those into
// parts. jobs/route.cpp chooses the sizes.
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

}  // namespace

void set_max_window_bytes(uint64_t bytes) {
  g_max_window_bytes = bytes;
}

std::vector<Window> cut_windows(const PackPlan& plan, WindowBytes window_bytes,
                                const std::function<bool(const ChunkPlan&)>& is_staged) {
  std::vector<Window> windows;
  uint64_t left = 0;
  for (const ChunkPlan& chunk : plan.chunks) left += is_staged(chunk) ? chunk.bytes : 0;
  uint64_t before = 0;
  // Returns the bytes of the next window.
  const auto next_bytes = [&](uint64_t step) {
    if (!window_bytes.grow) return step;
    return std::min(
        {step, std::max(before, kFirstWindowBytes), std::max(left / 2, kLastWindowBytes)});
  };
  const auto cut = [&](Window all, uint64_t most) {
    const uint64_t step = even_step(all.bytes(), most);
    while (all.begin < all.end) {
      // Windows end at cache lines. Chunks have the same offset in a line as on the target, so no
      // element is cut.
      const uint64_t line = (all.begin + next_bytes(step)) / kLineBytes * kLineBytes;
      windows.push_back(
          {all.begin, std::min(all.end, line > all.begin ? line : line + kLineBytes)});
      before += windows.back().bytes();
      left -= std::min(left, windows.back().bytes());
      all.begin = windows.back().end;
    }
  };
  const uint64_t most = std::min<uint64_t>(window_bytes.most, g_max_window_bytes);
  for (size_t i = 0; i < plan.chunks.size();) {
    const ChunkPlan& first = plan.chunks[i++];
    if (!is_staged(first)) continue;
    Window all{first.begin, first.end()};
    const auto goes_on = [&] {
      return i < plan.chunks.size() && first.packed && plan.chunks[i].packed &&
             is_staged(plan.chunks[i]);
    };
    for (; goes_on(); ++i) all.end = plan.chunks[i].end();
    cut(all, most);
  }
  return windows;
}

std::vector<WindowPart> cut_parts(const std::vector<Window>& windows) {
  constexpr uint64_t kSmallBytes = 512 * 1024;  // to be staged by one thread
  constexpr uint64_t kLeastBytes = 64 * 1024;
  constexpr uint64_t kMostBytes = 256 * 1024;
  std::vector<WindowPart> parts;
  for (size_t i = 0; i < windows.size(); ++i) {
    const auto [begin, end] = windows[i];
    const bool is_small = windows.size() == 1 && windows[i].bytes() <= kSmallBytes;
    const uint64_t eighth = std::clamp(windows[i].bytes() / 8, kLeastBytes, kMostBytes);
    const uint64_t step = is_small ? windows[i].bytes() : even_step(windows[i].bytes(), eighth);
    for (uint64_t at = begin; at < end;) {
      // Like windows, parts end at cache lines.
      const uint64_t line = std::max((at + step) / kLineBytes * kLineBytes, at + kLineBytes);
      const uint64_t next = end - at <= step ? end : std::min(end, line);
      parts.push_back({i, at, next});
      at = next;
    }
  }
  return parts;
}

}  // namespace tdcopier
