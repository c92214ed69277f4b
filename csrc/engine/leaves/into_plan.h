// Decides how leaves reach existing memory on a device (start_copy_into() and start_scatter()):
// straight, in runs, or through scratch memory from which the device scatters them.
// base/pack_plan.h decides which leaves share a chunk of new memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/pack_plan.h"
#include "engine/leaves/destination.h"

namespace tdcopier {

// Up to this many transfers are cheaper than one scatter on the device.
inline constexpr size_t kMostSmallRuns = 16;
// A run of this size is worth a transfer of its own.
inline constexpr uint64_t kLargeRunBytes = 64 * 1024;

// Chunks for existing memory. A chunk is a run, which has its slots at the offsets of adjoining
// destinations. Or it is scattered, and its entry in `to` is null.
struct IntoPlan {
  PackPlan pack;
  std::vector<std::byte*> to;  // by chunk
};

IntoPlan make_into_plan(const LeafTable& leaves, const DestinationTable& destinations,
                        uint64_t max_chunk_bytes);

}  // namespace tdcopier
