// Which rows are read or written, in what order, and the shape in which they arrive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/recycled.h"

namespace tdcopier {

// Rows of tables whose first `lead` dimensions count them.
struct RowIndex {
  RecycledVector<int64_t> rows;  // numbers of rows, each in [0, number of rows)
  std::vector<int64_t> sizes;    // what stands in a result's shape for the first `lead` dimensions
  size_t lead;
};

// Counts negative numbers from the end, in place. Returns the first number that no table of `size`
// rows has, as it was given; then others may have been counted already.
std::optional<int64_t> wrap_rows(std::span<int64_t> rows, int64_t size) noexcept;

// A number that is among them more than once, if there is one.
std::optional<int64_t> repeated_row(std::span<const int64_t> rows);

}  // namespace tdcopier
