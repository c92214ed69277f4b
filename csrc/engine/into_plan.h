// Decides how leaves travel to memory that exists on a device: straight there, in runs, or through
// a chunk that is scattered there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/pack_plan.h"
#include "engine/destination.h"

namespace tdcopier {

// Up to so many transfers cost less than a scatter on the device.
inline constexpr size_t kMostSmallRuns = 16;
// A run of so many bytes is worth a transfer of its own.
inline constexpr uint64_t kLargeRunBytes = 64 * 1024;

// Bytes [offset, offset + bytes) of a chunk's image, which lie together at the destination too.
struct Run {
  uint64_t offset;
  uint64_t bytes;
  std::byte* to;
};

// What becomes of a chunk's image: transfers to its runs, or it is allocated on the device and
// scattered there.
struct ChunkRuns {
  uint32_t first;  // runs [first, last) of the plan
  uint32_t last;
  bool scattered;  // then there are none
};

// The pack plan is that of the images: what is staged, or gathered on the sources' device. In a run
// the slots lie as the destinations do.
struct IntoPlan {
  PackPlan pack;
  std::vector<Run> runs;          // by chunk, offsets ascending
  std::vector<ChunkRuns> chunks;  // by chunk
};

IntoPlan make_into_plan(const LeafPairs& pairs, uint64_t max_chunk_bytes);

}  // namespace tdcopier
