// One-dimensional uint8 tensors over bytes that somebody else laid out.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>

namespace tdcopier {

// (bytes,) uint8 that owns `memory`, host or device.
at::Tensor byte_tensor(c10::DataPtr memory, uint64_t bytes);

// (bytes,) uint8 over `storage` from byte `offset` on.
at::Tensor byte_view(const c10::Storage& storage, uint64_t offset, uint64_t bytes);

// The backend key of a plain strided tensor on `device`; the tensor's constructor adds autograd's
// and autocast's. Never taken from a source, in whose key set conj, neg and Python bits may ride.
c10::DispatchKeySet plain_key_set(c10::Device device);

}  // namespace tdcopier
