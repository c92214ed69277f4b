// Selects the rows to read or write, their order, and the shape of the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/recycled.h"

namespace tdcopier {

// Rows of tables. A table's rows are counted over its first `lead` dimensions.
struct RowIndex {
  RecycledVector<int64_t> rows;  // numbers of rows, each in [0, number of rows)
  std::vector<int64_t> sizes;    // replaces the first `lead` dimensions in a result's shape
  size_t lead;
};

// Wraps negative numbers, which count from the end, in place. Returns the first number, as given,
// that is out of range for a table of `size` rows; other numbers may have been wrapped by then.
std::optional<int64_t> wrap_rows(std::span<int64_t> rows, int64_t size) noexcept;

// Returns a number that occurs more than once; nullopt if there is none.
std::optional<int64_t> repeated_row(std::span<const int64_t> rows);

}  // namespace tdcopier
