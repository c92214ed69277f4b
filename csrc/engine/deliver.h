// Writes leaves to where they belong in host memory.
#pragma once

#include <cstddef>

#include "base/pack_plan.h"
#include "engine/destination.h"
#include "engine/stage.h"

namespace tdcopier {

// Writes the window's share of each leaf from `staged`, which holds the window's bytes, to its
// destination.
void deliver_window(const PackPlan& plan, const LeafTable& leaves,
                    const DestinationTable& destinations, const Window& window,
                    const std::byte* staged);

// The same from the leaves themselves, which lie in host memory too.
void copy_window(const PackPlan& plan, const LeafTable& leaves,
                 const DestinationTable& destinations, const Window& window);

}  // namespace tdcopier
