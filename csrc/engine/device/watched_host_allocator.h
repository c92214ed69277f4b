// Which streams use leased memory through torch's own copies. Torch notes each `non_blocking` copy
// at the host allocator of the device's type, which knows only its own memory. So the engine's
// stands before it: it passes on everything, and notes the copies of the PinnedPool's memory there.
#pragma once

#include <c10/core/DeviceType.h>

namespace tdcopier {

// Puts the engine's allocator before torch's, once for each type. Thread: any.
void watch_host_allocator(c10::DeviceType type);

}  // namespace tdcopier
