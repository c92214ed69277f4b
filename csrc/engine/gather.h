// Collects leaves of a device into chunks, and writes them back from chunks.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <span>

#include "base/pack_plan.h"
#include "engine/destination.h"
#include "engine/leaf.h"

namespace tdcopier {

// Chunks [first, last) of a plan, and where each of them is.
struct ChunkMemory {
  size_t first;
  size_t last;
  std::span<std::byte* const> at;  // by chunk, from `first` on
};

// Requires, for all: `stream` is the current one of its device. They enqueue, and never block.

// Each leaf of the chunks to its slot, on the same device or in pinned memory that it can write.
// Leaves with gaps arrive without. Returns how many kernels of the engine's it has launched.
size_t gather(const c10::Stream& stream, const PackPlan& plan, const LeafTable& leaves,
              const ChunkMemory& chunks);

// Each leaf of the chunks from its slot to its destination on the same device.
void scatter(const c10::Stream& stream, const PackPlan& plan, const LeafTable& leaves,
             const DestinationTable& destinations, const ChunkMemory& chunks);

// Every leaf to its destination, both on the stream's device.
void copy_within(const c10::Stream& stream, const LeafTable& leaves,
                 const DestinationTable& destinations);

}  // namespace tdcopier
