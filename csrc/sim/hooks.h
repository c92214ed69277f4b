// The accelerator hooks, which torch's device-independent code calls.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>

namespace tdcopier::sim {

// Registers the hooks of PrivateUse1. Call once; it cannot be undone. Throws if others are
// registered.
void register_hooks();

// Resizes a storage of the device. The bytes that both sizes have are copied in the order of the
// current stream.
void resize_storage(const c10::Storage& storage, std::size_t bytes);

}  // namespace tdcopier::sim
