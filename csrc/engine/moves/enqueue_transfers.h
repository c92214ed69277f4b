// Enqueues one transfer on a stream of the engine, between raw addresses, in each direction.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

namespace tdcopier {

// Requires, for all: `stream` is the current one of its device, device addresses are on that
// device, and the memory stays alive until the transfer is done.

// Enqueues an H2D transfer from pinned memory. Returns at once.
void enqueue_to_device(const c10::Stream& stream, std::byte* to, const void* pinned,
                       uint64_t bytes);

// Enqueues a D2H transfer to pinned memory. Returns at once.
void enqueue_to_host(const c10::Stream& stream, std::byte* pinned, const void* from,
                     uint64_t bytes);

// Copies from the host (H2D) or to it (D2H), with any host memory. Blocks: until the bytes have
// been read, or have arrived. GIL: must not be held.
void copy_from_pageable(const c10::Stream& stream, std::byte* to, const void* host, uint64_t bytes);
void copy_to_pageable(const c10::Stream& stream, std::byte* host, const void* from, uint64_t bytes);

// Enqueues a D2D transfer on the source's stream. Requires: both are the current streams of their
// devices, and wait for each other as the memory needs it. Returns at once. `is_writable`: the
// source's device can write there, see engine/device/peer_memory.h. If not, torch's copy is used,
// which then makes it so, and makes both streams wait for each other.
void enqueue_between(const c10::Stream& target, std::byte* to, const c10::Stream& source,
                     const void* from, uint64_t bytes, bool is_writable);

}  // namespace tdcopier
