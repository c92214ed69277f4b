// Copies between host and device, and between and within devices.
#pragma once

#include <ATen/core/Tensor.h>

namespace tdcopier::sim {

// The operator behind Tensor.copy_ when source or target (or both) is on the simulated device.
// `source` may be of another dtype, of other strides and of a shape that expands to the target's.
//
// The bytes are moved by one operation on a stream, which reads and writes when it runs:
//   host to device, device to host: the device's current stream. The caller goes on at once only if
//     non_blocking is true and the host's memory is pinned, which is then recorded with the
//     allocator of pinned memory; otherwise the caller waits for the copy.
//   device to device: the source's current stream; the caller does not wait. Between two devices
//     the copy also comes after what is on the target's current stream, which then waits for it.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking);

// The same after giving the target the shape of the source; waits.
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target);

// The only element of a tensor, which is read in the order of the current stream; waits.
at::Scalar local_scalar(const at::Tensor& self);

}  // namespace tdcopier::sim
