// Copies bytes with stores that bypass the processor's caches.
#pragma once

#include <cstddef>

namespace tdcopier {

// Like std::memcpy, but writes to memory instead of the caches of the core: a device that reads the
// bytes next need not fetch them from there, and the other data in the caches stays. On processors
// without such stores it is std::memcpy.
//
// Ends with a store fence: a release store after the call publishes the bytes.
void copy_streaming(void* to, const void* from, size_t bytes) noexcept;

}  // namespace tdcopier
