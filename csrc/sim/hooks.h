// The accelerator hooks: what torch's device-independent code asks of the device.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>

namespace tdcopier::sim {

// Registers the hooks of PrivateUse1, once and for good. Errors if there are others.
void register_hooks();

// Gives a storage of the device another size. The bytes that both sizes have are copied in the
// order of the current stream.
void resize_storage(const c10::Storage& storage, std::size_t bytes);

}  // namespace tdcopier::sim
