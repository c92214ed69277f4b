// CUDA's transfers from and to pinned memory go through the driver, all others through ATen's copy,
// which every backend has.
#include "engine/moves/enqueue_transfers.h"

#include <c10/core/InferenceMode.h>

#include "engine/device/byte_tensor.h"
#include "engine/device/cuda_driver.h"
#include "engine/device/fallbacks.h"

namespace tdcopier {
namespace {

constexpr bool kNonBlocking = true;

// Returns a tensor over host memory that it does not own: the data pointer has no deleter.
at::Tensor on_host(const void* address, uint64_t bytes) {
  return byte_tensor(c10::DataPtr(const_cast<void*>(address), c10::Device(c10::kCPU)), bytes);
}

// Returns the driver, which takes about 2 us where ATen's copy takes 7 to 16; null if this kind of
// device has none. If a driver call fails, ATen's copy succeeds (on a thread's first use of the
// device), or fails with torch's own error.
const CudaDriver* driver_for(const c10::Stream& stream) {
  return stream.device_type() == c10::DeviceType::CUDA ? cuda_driver() : nullptr;
}

}  // namespace

void enqueue_to_device(const c10::Stream& stream, std::byte* to, const void* pinned,
                       uint64_t bytes) {
  const CudaDriver* driver = driver_for(stream);
  if (driver != nullptr && driver->copy_host_to_device(reinterpret_cast<uint64_t>(to), pinned,
                                                       bytes, native_handle(stream)) == 0) {
    return;
  }
  note_fallback(stream.device_type());
  const c10::InferenceMode no_autograd;
  bytes_at(stream.device(), to, bytes).copy_(on_host(pinned, bytes), kNonBlocking);
}

void enqueue_to_host(const c10::Stream& stream, std::byte* pinned, const void* from,
                     uint64_t bytes) {
  const CudaDriver* driver = driver_for(stream);
  if (driver != nullptr && driver->copy_device_to_host(pinned, reinterpret_cast<uint64_t>(from),
                                                       bytes, native_handle(stream)) == 0) {
    return;
  }
  note_fallback(stream.device_type());
  const c10::InferenceMode no_autograd;
  on_host(pinned, bytes).copy_(bytes_at(stream.device(), from, bytes), kNonBlocking);
}

void copy_from_pageable(const c10::Stream& stream, std::byte* to, const void* host,
                        uint64_t bytes) {
  const c10::InferenceMode no_autograd;
  bytes_at(stream.device(), to, bytes).copy_(on_host(host, bytes));
}

void copy_to_pageable(const c10::Stream& stream, std::byte* host, const void* from,
                      uint64_t bytes) {
  const c10::InferenceMode no_autograd;
  on_host(host, bytes).copy_(bytes_at(stream.device(), from, bytes));
}

void enqueue_between(const c10::Stream& target, std::byte* to, const c10::Stream& source,
                     const void* from, uint64_t bytes, bool is_writable) {
  if (is_writable &&
      cuda_driver()->copy_any(reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from),
                              bytes, native_handle(source)) == 0) {
    return;
  }
  if (is_writable) note_fallback(source.device_type());
  const c10::InferenceMode no_autograd;
  bytes_at(target.device(), to, bytes).copy_(bytes_at(source.device(), from, bytes), kNonBlocking);
}

}  // namespace tdcopier
