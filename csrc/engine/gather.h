// Collects leaves that lie on a device into one chunk's memory there.
#pragma once

#include <cstddef>

#include "base/pack_plan.h"
#include "engine/accelerator.h"
#include "engine/leaf.h"

namespace tdcopier {

// Enqueues on the accelerator's copy stream, which is the current one: each leaf of `chunk` to its
// slot in `memory`, on the same device. Leaves with gaps arrive without. Never blocks.
void gather(Accelerator& accelerator, const PackPlan& plan, const ChunkPlan& chunk,
            const LeafTable& leaves, std::byte* memory);

}  // namespace tdcopier
