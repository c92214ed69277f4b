// Tells whether bytes of a memory-mapped file are in memory already.
#pragma once

#include <cstddef>

namespace tdcopier {

// Returns whether all of these bytes are in memory, so that reading them does not wait for a disk.
// Also true if the kernel cannot tell. Never blocks.
bool is_resident(const void* data, size_t bytes);

}  // namespace tdcopier
