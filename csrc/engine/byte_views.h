// Tensors that stand for any bytes of a device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace tdcopier {

// A view owns nothing: the caller sees to it that the memory stays. Requires, for making and for
// using them: InferenceMode, so that no version counter or gradient is involved. Never handed out.

// (bytes,) uint8 at `address`.
at::Tensor bytes_at(c10::Device device, const void* address, uint64_t bytes);

// Elements of `element_bytes` (1, 2, 4, 8 or 16) at `address`, which is a multiple of that.
at::Tensor elements_at(c10::Device device, const void* address, uint32_t element_bytes,
                       at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace tdcopier
