// Copies an array with gaps, repeats or a reversed order to contiguous bytes, and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tdcopier {

// One dimension of an array; arrays list them outermost first.
struct StridedDim {
  int64_t size;          // at least 1
  int64_t stride_bytes;  // to the next element; 0 repeats, negative reverses

  friend bool operator==(const StridedDim&, const StridedDim&) = default;
};

// Copies elements [first, last) of the array at `from` to contiguous bytes; element `first` goes to
// `to`. Elements are counted along the innermost dimension first.
void copy_strided(const std::byte* from, std::span<const StridedDim> dims, uint32_t element_bytes,
                  uint64_t first, uint64_t last, std::byte* to);

// The reverse: copies elements [first, last), which are contiguous at `from`, to the array at `to`.
// Requires: no two elements of the array share a byte.
void copy_to_strided(std::byte* to, std::span<const StridedDim> dims, uint32_t element_bytes,
                     uint64_t first, uint64_t last, const std::byte* from);

// Joins dimensions that are laid out like one, in place, and drops those of size 1. Returns how
// many are left.
size_t join_dims(std::span<StridedDim> dims);

}  // namespace tdcopier
