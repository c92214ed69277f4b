// The accelerator hooks, which torch's device-independent code calls.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>

namespace tdcopier::sim {

// Registers the hooks of PrivateUse1. Call once; it cannot be undone. Throws if others are
// registered.
void register_hooks();

// Returns how often torch or the engine has asked whether memory is pinned.
std::int64_t pinned_queries();

// Resizes a storage of the device. The bytes that both sizes have are copied in the order of the
// current stream.
void resize_storage(const c10::Storage& storage, std::size_t bytes);

}  // namespace tdcopier::sim
