// Reads an array with gaps, repeats or a reversed order into bytes without them, and writes one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tdcopier {

// One dimension of an array, outermost first.
struct StridedDim {
  int64_t size;          // at least 1
  int64_t stride_bytes;  // to the next along it; 0 repeats, negative reverses
};

// Writes elements [first, last) of the array at `from` to `to`, one behind the other; elements are
// counted along the innermost dimension first. `to` is where element `first` goes.
void copy_strided(const std::byte* from, std::span<const StridedDim> dims, uint32_t element_bytes,
                  uint64_t first, uint64_t last, std::byte* to);

// The reverse: writes elements [first, last), which lie one behind the other at `from`, to the
// array at `to`. No two of its elements may share a byte.
void copy_to_strided(std::byte* to, std::span<const StridedDim> dims, uint32_t element_bytes,
                     uint64_t first, uint64_t last, const std::byte* from);

// Joins dimensions that lie in memory like one, in place; drops those of size 1. Returns how many
// are left.
size_t join_dims(std::span<StridedDim> dims);

}  // namespace tdcopier
