// Tells whether arrays that are written share memory with each other or with what is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/strided_copy.h"

namespace tdcopier {

// One array's memory. Its bytes lie together if `dims` is empty.
struct Area {
  const std::byte* begin;  // the first element
  uint64_t bytes;          // of one element, or of all where they lie together
  bool written;
  std::vector<StridedDim> dims;
};

// Arrays with gaps are compared row by row; where those that reach into one another have more rows
// than this, the ones with the most rows count as apart.
inline constexpr uint64_t kMostComparedRows = 1 << 20;

// Two areas, by index, that share a byte, and one of which at least is written; if there are any.
// No written area may overlap itself.
std::optional<std::pair<size_t, size_t>> find_overlap(std::span<const Area> areas);

// Do two elements share a byte? Where that would take too long to tell, yes.
bool overlaps_itself(std::span<const StridedDim> dims, uint64_t element_bytes);

}  // namespace tdcopier
