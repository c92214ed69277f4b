// Puts one transfer on a stream of the engine's, by raw addresses, in each direction.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

namespace tdcopier {

// Requires, for all: `stream` is the current one of its device, and memory stays until the transfer
// is done. A device's address is one on the stream's device.

// H2D from pinned memory. Returns at once.
void enqueue_to_device(const c10::Stream& stream, std::byte* to, const void* pinned,
                       uint64_t bytes);

// D2H to pinned memory. Returns at once.
void enqueue_to_host(const c10::Stream& stream, std::byte* pinned, const void* from,
                     uint64_t bytes);

// H2D from, and D2H to, any host memory. Blocks: until the bytes have been read, or have arrived.
// GIL: must not be held.
void copy_from_pageable(const c10::Stream& stream, std::byte* to, const void* host, uint64_t bytes);
void copy_to_pageable(const c10::Stream& stream, std::byte* host, const void* from, uint64_t bytes);

// D2D between two devices, whose current streams both are: the source's works, the target's waits
// for it. Returns at once.
void enqueue_between(const c10::Stream& target, std::byte* to, const c10::Stream& source,
                     const void* from, uint64_t bytes);

}  // namespace tdcopier
