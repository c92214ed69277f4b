// Transfers: straight to CUDA's driver, else through ATen's copy, which every backend of torch has.
#include "engine/transport.h"

#include <c10/core/InferenceMode.h>

#include <utility>

#include "engine/byte_tensor.h"
#include "engine/cuda_driver.h"

namespace tdcopier {
namespace {

void copy_bytes(const c10::Storage& chunk, uint64_t offset, const at::Tensor& host,
                bool non_blocking) {
  byte_view(chunk, offset, static_cast<uint64_t>(host.numel())).copy_(host, non_blocking);
}

// About 2 us where ATen's copy takes 7 to 16. False if the driver did not take it: ATen's copy then
// succeeds (a thread's first use of the device), or fails with torch's own error.
bool enqueue_through_driver(const c10::Stream& stream, const c10::Storage& chunk, uint64_t offset,
                            const at::Tensor& host, uint64_t bytes) {
  if (stream.device_type() != c10::DeviceType::CUDA || cuda_driver() == nullptr) return false;
  const auto address = reinterpret_cast<uint64_t>(chunk.data()) + offset;
  return cuda_driver()->copy_host_to_device(address, host.const_data_ptr(), bytes,
                                            native_handle(stream)) == 0;
}

}  // namespace

void enqueue_from_pinned(const c10::Stream& stream, const c10::Storage& chunk, uint64_t offset,
                         const at::Tensor& host, uint64_t bytes) {
  if (enqueue_through_driver(stream, chunk, offset, host, bytes)) return;
  const c10::InferenceMode no_autograd;
  copy_bytes(chunk, offset, byte_view(host.storage(), 0, bytes), /*non_blocking=*/true);
}

void copy_from_pageable(const c10::Storage& chunk, uint64_t offset, const void* host,
                        uint64_t bytes) {
  const c10::InferenceMode no_autograd;
  // The data pointer has no deleter: the bytes stay their owner's.
  c10::DataPtr memory(const_cast<void*>(host), c10::Device(c10::kCPU));
  copy_bytes(chunk, offset, byte_tensor(std::move(memory), bytes), /*non_blocking=*/false);
}

}  // namespace tdcopier
