// Detects arrays that are written and share memory with other arrays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/strided_copy.h"

namespace tdcopier {

// The memory of one array. It is contiguous if `dims` is empty.
struct Area {
  const std::byte* begin;  // the first element
  uint64_t bytes;          // of one element, or of the whole array if it is contiguous
  bool written;
  std::vector<StridedDim> dims;
};

// Arrays with gaps are compared row by row. If arrays whose bounds overlap have more rows than
// this, those with the most rows are treated as not overlapping.
inline constexpr uint64_t kMostComparedRows = 1 << 20;

// Returns the indices of two areas that share a byte, at least one of which is written; nullopt if
// there are none. Requires: no written area overlaps itself.
std::optional<std::pair<size_t, size_t>> find_overlap(std::span<const Area> areas);

// Returns whether two elements share a byte; true if an exact answer would take too long.
bool overlaps_itself(std::span<const StridedDim> dims, uint64_t element_bytes);

}  // namespace tdcopier
