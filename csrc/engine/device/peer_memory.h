// Whether one device can write the memory of another itself, so that no chunk has to be gathered
// first, and torch's copies with their events for each are not needed. jobs/route.cpp asks.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>

namespace tdcopier {

// Returns whether kernels and transfers of `device` can write these bytes, which are memory of
// `peer`. Torch lets them with its own first copy from one to the other, for memory of its
// allocators; until then, and for other memory, the answer may be no. CUDA only. Thread: any.
bool can_write_peer(c10::Device device, c10::Device peer, const std::byte* begin, uint64_t bytes);

// Returns the last answer for these two devices; false before the first.
bool could_write_peer(c10::Device device, c10::Device peer);

}  // namespace tdcopier
