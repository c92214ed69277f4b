// Gathers leaves of a device into chunks, and scatters chunks to the leaves' destinations. (Rows of
// tables on the host: base/row_copy.h.) jobs/route.cpp decides which chunks are gathered, and which
// of them straight into pinned memory, or memory of another device.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/pack_plan.h"
#include "engine/leaves/destination.h"
#include "engine/leaves/leaf.h"

namespace tdcopier {

// Chunks [first, last) of a plan, and the address of each.
struct ChunkMemory {
  size_t first;
  size_t last;
  std::span<std::byte* const> at;  // by chunk, from `first` on
};

// All functions here enqueue work and never block. Requires: `stream` is the current one of its
// device.

// Copies each leaf of the chunks to its slot, on the same device or in pinned memory that the
// device can write. Strided leaves arrive without gaps. Returns the number of the engine's kernels
// that were launched.
size_t gather(const c10::Stream& stream, const PackPlan& plan, const LeafTable& leaves,
              const ChunkMemory& chunks);

// Returns what gather() would return for chunks [first, last) on a device that has the kernel. Does
// nothing else.
size_t gather_launches(const PackPlan& plan, const LeafTable& leaves, size_t first, size_t last);

// Copies each leaf of the chunks from its slot to its destination, on the same device.
void scatter(const c10::Stream& stream, const PackPlan& plan, const LeafTable& leaves,
             const DestinationTable& destinations, const ChunkMemory& chunks);

// Copies every leaf to its destination, both on the stream's device.
void copy_within(const c10::Stream& stream, const LeafTable& leaves,
                 const DestinationTable& destinations);

// The same for memory of any kind of object. Requires: what is written does not overlap anything.
struct ByteCopy {
  const std::byte* from;
  std::byte* to;
  uint64_t bytes;
};
void copy_within(const c10::Stream& stream, std::span<const ByteCopy> copies);

}  // namespace tdcopier
