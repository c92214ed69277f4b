// Puts one transfer on a copy stream, in each direction.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

#include "engine/byte_views.h"
#include "engine/chunk.h"

namespace tdcopier {

// The device's address and the stream's device are one. All require that `stream` is the current
// one of its device.

// H2D. Enqueues bytes [0, bytes) of `host`, which is pinned and must stay as it is until the
// transfer is done, to `offset` of `chunk`.
void enqueue_from_pinned(const c10::Stream& stream, const Chunk& chunk, uint64_t offset,
                         const at::Tensor& host, uint64_t bytes);

// H2D. The same from pinned memory at `host`, which its owner keeps until the transfer is done.
void enqueue_from_pinned(const c10::Stream& stream, const Chunk& chunk, const void* host,
                         uint64_t bytes);

// H2D. The same to any address of the device, from `offset` of `host` on.
void enqueue_from_pinned(const c10::Stream& stream, ByteViews& views, const at::Tensor& host,
                         uint64_t offset, void* address, uint64_t bytes);

// H2D from any host memory. Blocks: until the bytes have been read. GIL: must not be held.
void copy_from_pageable(const Chunk& chunk, uint64_t offset, const void* host, uint64_t bytes);

// H2D. The same to any address of the device. Blocks: until the bytes have been read.
void copy_from_pageable(ByteViews& views, const void* host, void* address, uint64_t bytes);

// D2H. Enqueues `bytes` at the device's `address` to the beginning of `chunk`, which is pinned and
// not given to anybody else before the transfer is done, even if it is dropped.
void enqueue_to_pinned(const c10::Stream& stream, ByteViews& views, const void* address,
                       const Chunk& chunk, uint64_t bytes);

// What is on the stream now writes to `chunk`, which is pinned: it is not given to anybody else
// before that is done, even if it is dropped.
void note_written(const c10::Stream& stream, const Chunk& chunk);

// D2H. The same to pinned memory at `host`, which its owner keeps until the transfer is done.
void enqueue_to_pinned(const c10::Stream& stream, ByteViews& views, const void* address, void* host,
                       uint64_t bytes);

// D2H to any host memory. Blocks: until the bytes have arrived. GIL: must not be held.
void copy_to_pageable(ByteViews& views, const void* address, const Chunk& chunk, uint64_t bytes);

void copy_to_pageable(ByteViews& views, const void* address, void* host, uint64_t bytes);

// D2D. Enqueues `bytes` at the source device's `address` to the beginning of `chunk` on another
// one, between the current streams of both: the source's works, the target's waits for it.
void enqueue_between(ByteViews& views, const void* address, const Chunk& chunk, uint64_t bytes);

// D2D. The same to any address of the other device, of which `to_views` is.
void enqueue_between(ByteViews& from_views, const void* from, ByteViews& to_views, void* to,
                     uint64_t bytes);

}  // namespace tdcopier
