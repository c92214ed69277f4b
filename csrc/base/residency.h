// Whether bytes of a memory-mapped file are in memory already.
#pragma once

#include <cstddef>

namespace tdcopier {

// Are all of these bytes in memory, so that to read them does not wait for a disk? Also true where
// that cannot be told. Never blocks.
bool is_resident(const void* data, size_t bytes);

}  // namespace tdcopier
