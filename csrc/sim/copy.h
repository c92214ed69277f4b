// Copies between host and device, and between and within devices.
#pragma once

#include <ATen/core/Tensor.h>

namespace tdcopier::sim {

// Returns whether a tensor is on the simulated device; an undefined one is not.
bool is_sim(const at::Tensor& tensor);

// Implements Tensor.copy_ where the source, the target or both are on the simulated device.
// `source` may have another dtype, other strides, and a shape that expands to the target's.
//
// One operation on a stream moves the bytes; it reads and writes when it runs:
//   host to device, device to host: on the device's current stream. The caller continues at once
//     only if non_blocking is true and the host's memory is pinned, whose use is then recorded with
//     the allocator of pinned memory; otherwise the caller waits for the copy.
//   device to device: on the source's current stream; the caller does not wait. Between two devices
//     the copy also runs after the work on the target's current stream, which then waits for it.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking);

// The same after resizing the target to the source's shape. Blocks: until the copy is done.
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target);

// Returns the only element of a tensor, read in the order of the current stream. Blocks.
at::Scalar local_scalar(const at::Tensor& self);

}  // namespace tdcopier::sim
