// Transfers through ATen's copy of byte tensors, which every backend of torch has.
#include "engine/transport.h"

#include <c10/core/InferenceMode.h>

#include "engine/byte_tensor.h"

namespace tdcopier {
namespace {

void copy_bytes(const c10::Storage& chunk, uint64_t offset, const at::Tensor& host,
                bool non_blocking) {
  byte_view(chunk, offset, static_cast<uint64_t>(host.numel())).copy_(host, non_blocking);
}

}  // namespace

void enqueue_from_pinned(const c10::Storage& chunk, uint64_t offset, const at::Tensor& host,
                         uint64_t bytes) {
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
