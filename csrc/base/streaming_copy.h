// Copies bytes past the processor's caches.
#pragma once

#include <cstddef>

namespace tdcopier {

// As std::memcpy, but what is written goes to memory rather than stay in the caches of the core
// that wrote it: a device that reads it next need not fetch it from there, and whatever else the
// caches hold stays. Where the processor has no such stores it is std::memcpy.
//
// When it returns, whoever is told that the bytes are there sees them.
void copy_streaming(void* to, const void* from, size_t bytes) noexcept;

}  // namespace tdcopier
