// Transfers: straight to CUDA's driver, else through ATen's copy, which every backend of torch has.
#include "engine/transport.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/InferenceMode.h>

#include <utility>

#include "engine/byte_tensor.h"
#include "engine/cuda_driver.h"
#include "engine/fallbacks.h"

namespace tdcopier {
namespace {

at::Tensor part_of(const Chunk& chunk, uint64_t offset, uint64_t bytes) {
  return byte_view(chunk.storage, chunk.shift_bytes + offset, bytes);
}

at::Tensor at_address(ByteViews& views, const void* address, uint64_t bytes) {
  return views.strided(address, /*element_bytes=*/1, static_cast<int64_t>(bytes), int64_t{1});
}

// Host memory that stays its owner's: the data pointer has no deleter.
at::Tensor on_host(const void* address, uint64_t bytes) {
  return byte_tensor(c10::DataPtr(const_cast<void*>(address), c10::Device(c10::kCPU)), bytes);
}

// The driver takes about 2 us where ATen's copy takes 7 to 16. Null where there is none, for this
// kind of device. Where it refuses, ATen's copy succeeds (a thread's first use of the device), or
// fails with torch's own error.
const CudaDriver* driver_for(const c10::Stream& stream) {
  return stream.device_type() == c10::DeviceType::CUDA ? cuda_driver() : nullptr;
}

}  // namespace

void enqueue_from_pinned(const c10::Stream& stream, const Chunk& chunk, uint64_t offset,
                         const at::Tensor& host, uint64_t bytes) {
  const CudaDriver* driver = driver_for(stream);
  if (driver != nullptr &&
      driver->copy_host_to_device(reinterpret_cast<uint64_t>(chunk.at(offset)),
                                  host.const_data_ptr(), bytes, native_handle(stream)) == 0) {
    return;
  }
  note_fallback(stream.device_type());
  const c10::InferenceMode no_autograd;
  part_of(chunk, offset, bytes).copy_(byte_view(host.storage(), 0, bytes), /*non_blocking=*/true);
}

void enqueue_from_pinned(const c10::Stream& stream, const Chunk& chunk, const void* host,
                         uint64_t bytes) {
  const CudaDriver* driver = driver_for(stream);
  if (driver != nullptr && driver->copy_host_to_device(reinterpret_cast<uint64_t>(chunk.at(0)),
                                                       host, bytes, native_handle(stream)) == 0) {
    return;
  }
  note_fallback(stream.device_type());
  const c10::InferenceMode no_autograd;
  part_of(chunk, 0, bytes).copy_(on_host(host, bytes), /*non_blocking=*/true);
}

void copy_from_pageable(const Chunk& chunk, uint64_t offset, const void* host, uint64_t bytes) {
  const c10::InferenceMode no_autograd;
  part_of(chunk, offset, bytes).copy_(on_host(host, bytes));
}

// As ATen's copy does.
void note_written(const c10::Stream& stream, const Chunk& chunk) {
  const c10::DataPtr& memory = chunk.storage.data_ptr();
  at::getHostAllocator(stream.device_type())
      ->record_event(memory.get(), memory.get_context(), stream);
}

void enqueue_to_pinned(const c10::Stream& stream, ByteViews& views, const void* address,
                       const Chunk& chunk, uint64_t bytes) {
  const CudaDriver* driver = driver_for(stream);
  if (driver != nullptr &&
      driver->copy_device_to_host(chunk.at(0), reinterpret_cast<uint64_t>(address), bytes,
                                  native_handle(stream)) == 0) {
    note_written(stream, chunk);
    return;
  }
  note_fallback(stream.device_type());
  const c10::InferenceMode no_autograd;
  part_of(chunk, 0, bytes).copy_(at_address(views, address, bytes), /*non_blocking=*/true);
}

void copy_to_pageable(ByteViews& views, const void* address, const Chunk& chunk, uint64_t bytes) {
  const c10::InferenceMode no_autograd;
  part_of(chunk, 0, bytes).copy_(at_address(views, address, bytes));
}

void enqueue_between(ByteViews& views, const void* address, const Chunk& chunk, uint64_t bytes) {
  const c10::InferenceMode no_autograd;
  part_of(chunk, 0, bytes).copy_(at_address(views, address, bytes), /*non_blocking=*/true);
}

void enqueue_from_pinned(const c10::Stream& stream, ByteViews& views, const at::Tensor& host,
                         uint64_t offset, void* address, uint64_t bytes) {
  const CudaDriver* driver = driver_for(stream);
  if (driver != nullptr &&
      driver->copy_host_to_device(reinterpret_cast<uint64_t>(address),
                                  static_cast<const std::byte*>(host.const_data_ptr()) + offset,
                                  bytes, native_handle(stream)) == 0) {
    return;
  }
  note_fallback(stream.device_type());
  const c10::InferenceMode no_autograd;
  at_address(views, address, bytes)
      .copy_(byte_view(host.storage(), offset, bytes), /*non_blocking=*/true);
}

void copy_from_pageable(ByteViews& views, const void* host, void* address, uint64_t bytes) {
  const c10::InferenceMode no_autograd;
  at_address(views, address, bytes).copy_(on_host(host, bytes));
}

void enqueue_to_pinned(const c10::Stream& stream, ByteViews& views, const void* address, void* host,
                       uint64_t bytes) {
  const CudaDriver* driver = driver_for(stream);
  if (driver != nullptr && driver->copy_device_to_host(host, reinterpret_cast<uint64_t>(address),
                                                       bytes, native_handle(stream)) == 0) {
    return;
  }
  note_fallback(stream.device_type());
  const c10::InferenceMode no_autograd;
  on_host(host, bytes).copy_(at_address(views, address, bytes), /*non_blocking=*/true);
}

void copy_to_pageable(ByteViews& views, const void* address, void* host, uint64_t bytes) {
  const c10::InferenceMode no_autograd;
  on_host(host, bytes).copy_(at_address(views, address, bytes));
}

void enqueue_between(ByteViews& from_views, const void* from, ByteViews& to_views, void* to,
                     uint64_t bytes) {
  const c10::InferenceMode no_autograd;
  at_address(to_views, to, bytes).copy_(at_address(from_views, from, bytes), /*non_blocking=*/true);
}

}  // namespace tdcopier
