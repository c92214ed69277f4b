// Makes tensors over given memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>

#include <cstdint>

namespace tdcopier {

// Returns the backend key of a plain strided tensor on `device`; the tensor's constructor adds the
// autograd and autocast keys. The keys of an output never come from a source, whose key set may
// include conj, neg and Python bits.
c10::DispatchKeySet plain_key_set(c10::Device device);

// Returns a uint8 tensor of shape (bytes,) that owns `memory`, on the host or a device.
at::Tensor byte_tensor(c10::DataPtr memory, uint64_t bytes);

// The views below own nothing: the caller keeps the memory alive. They are never handed out.
// Requires, to make and to use them: InferenceMode, so that no version counter or gradient is
// involved.

// Returns a uint8 view of shape (bytes,) at `address`.
at::Tensor bytes_at(c10::Device device, const void* address, uint64_t bytes);

// Returns a view of elements of `element_bytes` (1, 2, 4, 8 or 16) at `address`. Requires:
// `address` is a multiple of `element_bytes`.
at::Tensor elements_at(c10::Device device, const void* address, uint32_t element_bytes,
                       at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace tdcopier
