// The memory of an object with Python's buffer protocol, as a storage.
#pragma once

#include <c10/core/Storage.h>
#include <pybind11/pybind11.h>

namespace tdcopier {

struct BufferMemory {
  c10::Storage storage;  // keeps the object alive, and its memory where it is; cannot be resized
  bool is_read_only;
};

// Returns the memory of the object: contiguous bytes. GIL: held; the storage may be dropped without
// it. Throws: what the object raises, TypeError if it has no buffer.
BufferMemory memory_of_buffer(pybind11::handle object);

// Returns a storage over the same memory from this byte on, which keeps `whole` alive. Requires:
// it has these bytes.
c10::Storage part_of_memory(const c10::Storage& whole, uint64_t begin, uint64_t bytes);

}  // namespace tdcopier
