// Puts one host-to-device transfer on a copy stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace tdcopier {

// Enqueues on `stream`, which is the current one of the chunk's device: bytes [0, bytes) of `host`
// to [offset, offset + bytes) of `chunk`. `host` is pinned; it must stay as it is until the
// transfer is done.
void enqueue_from_pinned(const c10::Stream& stream, const c10::Storage& chunk, uint64_t offset,
                         const at::Tensor& host, uint64_t bytes);

// The same from any host memory. Blocks: until the bytes have been read. GIL: must not be held.
// Requires: the copy stream is current.
void copy_from_pageable(const c10::Storage& chunk, uint64_t offset, const void* host,
                        uint64_t bytes);

}  // namespace tdcopier
