// Writes leaves to their destinations in host memory.
#pragma once

#include <cstddef>

#include "base/pack_plan.h"
#include "engine/leaves/destination.h"
#include "engine/moves/stage.h"

namespace tdcopier {

// Writes the window's part of each leaf to its destination, from `staged`, which holds the window's
// bytes.
void deliver_window(const PackPlan& plan, const LeafTable& leaves,
                    const DestinationTable& destinations, const Window& window,
                    const std::byte* staged);

// The same, straight from the leaves, which are in host memory too.
void copy_window(const PackPlan& plan, const LeafTable& leaves,
                 const DestinationTable& destinations, const Window& window);

}  // namespace tdcopier
