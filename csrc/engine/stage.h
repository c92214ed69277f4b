// Cuts the chunks of a pack plan into windows, one transfer each, and fills staging memory with
// them.
#pragma once

#include <cstdint>
#include <vector>

#include "base/pack_plan.h"
#include "engine/leaf.h"

namespace tdcopier {

// Bytes [begin, end) of one chunk.
struct Window {
  uint32_t chunk;
  uint64_t begin;
  uint64_t end;
};

// A chunk with strided leaves is cut into windows of this size: to read them takes so much longer
// that it is worth more hands.
inline constexpr uint64_t kStridedWindowBytes = 1024 * 1024;

// Another bound for all windows, for tests that want many of them for little. Thread: any.
void set_max_window_bytes(uint64_t bytes);

// Windows of at most `max_window_bytes` that cover every chunk, in the plan's order.
std::vector<Window> cut_windows(const PackPlan& plan, const LeafTable& leaves,
                                uint64_t max_window_bytes);

// Writes the window's share of each leaf to where it belongs in `staging`, which holds the window's
// bytes. Bytes between slots are left as they are.
void stage_window(const PackPlan& plan, const LeafTable& leaves, const Window& window,
                  std::byte* staging);

}  // namespace tdcopier
