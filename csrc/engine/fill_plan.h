// Decides how leaves travel to memory that exists on a device: straight there, in runs, or through
// scratch memory from which the device scatters them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/pack_plan.h"
#include "engine/destination.h"

namespace tdcopier {

// Up to this many transfers are cheaper than one scatter on the device.
inline constexpr size_t kMostSmallRuns = 16;
// A run of this size is worth a transfer of its own.
inline constexpr uint64_t kLargeRunBytes = 64 * 1024;

// A chunk is a run: destinations that lie together, and slots as they lie. Or it is scattered, and
// its place in `to` is null.
struct FillPlan {
  PackPlan pack;
  std::vector<std::byte*> to;  // by chunk
};

FillPlan make_fill_plan(const LeafPairs& pairs, uint64_t max_chunk_bytes);

}  // namespace tdcopier
