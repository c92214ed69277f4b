// Writes leaves that lie on a device to where they belong on the same device.
#pragma once

#include <cstddef>

#include "base/pack_plan.h"
#include "engine/accelerator.h"
#include "engine/destination.h"

namespace tdcopier {

// Enqueues on `stream`, which is the current one of the accelerator: each leaf of `chunk` from its
// slot in `memory` to its destination. Never blocks.
void scatter(Accelerator& accelerator, const c10::Stream& stream, const PackPlan& plan,
             const ChunkPlan& chunk, const LeafTable& leaves, const DestinationTable& destinations,
             std::byte* memory);

// Enqueues on the accelerator's current stream: every leaf from where it is to its destination,
// both on this device. Never blocks.
void copy_within(Accelerator& accelerator, const LeafTable& leaves,
                 const DestinationTable& destinations);

}  // namespace tdcopier
