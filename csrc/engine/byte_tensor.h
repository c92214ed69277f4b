// Tensors over given bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>

#include <cstdint>

namespace tdcopier {

// The backend key of a plain strided tensor on `device`; the tensor's constructor adds autograd's
// and autocast's. Never taken from a source, in whose key set conj, neg and Python bits may ride.
c10::DispatchKeySet plain_key_set(c10::Device device);

// (bytes,) uint8 that owns `memory`, host or device.
at::Tensor byte_tensor(c10::DataPtr memory, uint64_t bytes);

// A view owns nothing: the caller sees to it that the memory stays. Requires, for making and for
// using them: InferenceMode, so that no version counter or gradient is involved. Never handed out.

// (bytes,) uint8 at `address`.
at::Tensor bytes_at(c10::Device device, const void* address, uint64_t bytes);

// Elements of `element_bytes` (1, 2, 4, 8 or 16) at `address`, which is a multiple of that.
at::Tensor elements_at(c10::Device device, const void* address, uint32_t element_bytes,
                       at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace tdcopier
