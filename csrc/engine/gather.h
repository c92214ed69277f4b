// Collects leaves that lie on a device into one chunk's memory there.
#pragma once

#include <cstddef>

#include "base/pack_plan.h"
#include "engine/accelerator.h"
#include "engine/leaf.h"

namespace tdcopier {

// Enqueues on `stream`, which is the current one of the accelerator: each leaf of `chunk` to its
// slot in `memory`, on the same device. Leaves with gaps arrive without. Never blocks.
void gather(Accelerator& accelerator, const c10::Stream& stream, const PackPlan& plan,
            const ChunkPlan& chunk, const LeafTable& leaves, std::byte* memory);

}  // namespace tdcopier
