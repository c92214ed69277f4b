// Enqueues transfers on a stream of the engine, between raw addresses, in each direction.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace tdcopier {

struct Transfer {
  std::byte* to;
  const std::byte* from;
  uint64_t bytes;  // not 0
};

// Requires, for all that enqueue: `stream` is the current one of its device, device addresses are
// on that device, and the memory stays alive until the transfers are done.
//
// Transfers of some size that are enqueued together are one piece of work for the device, if the
// driver can do that. Beside the bytes, a piece takes an H200 2.6 us, however many transfers it
// has: 256 MiB in single ones of 2 MiB take 1.086 times as long as one DMA, in pairs 1.047, and in
// groups of four 1.023.

// Lets transfers go together, or enqueues all one by one, for tests and benchmarks. Thread: any.
void use_batch_transfers(bool use);

// Returns whether transfers on this stream can go together. Devices other than CUDA's never let
// them, but yes is the answer for those too, so that the simulated one does all that CUDA's do.
bool may_go_together(const c10::Stream& stream);

// Enqueues H2D transfers from pinned memory. Returns at once.
void enqueue_to_device(const c10::Stream& stream, std::span<const Transfer> transfers);

// Enqueues D2H transfers to pinned memory. Returns at once.
void enqueue_to_host(const c10::Stream& stream, std::span<const Transfer> transfers);

// Copies from the host (H2D) or to it (D2H), with any host memory. Blocks: until the bytes have
// been read, or have arrived. GIL: must not be held.
void copy_from_pageable(const c10::Stream& stream, std::byte* to, const void* host, uint64_t bytes);
void copy_to_pageable(const c10::Stream& stream, std::byte* host, const void* from, uint64_t bytes);

// Enqueues D2D transfers on the source's stream. Requires: both are the current streams of their
// devices, and wait for each other as the memory needs it. Returns at once. `is_writable`: the
// source's device can write to all, see engine/device/peer_memory.h. If not, torch's copy is used,
// which then makes it so, and makes both streams wait for each other.
void enqueue_between(const c10::Stream& target, const c10::Stream& source,
                     std::span<const Transfer> transfers, bool is_writable);

}  // namespace tdcopier
