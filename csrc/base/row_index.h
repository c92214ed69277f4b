// Selects the rows to read or write, their order, and the shape of the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/recycled.h"

namespace tdcopier {

// Row numbers in a device's memory, as the caller gave them: they may be negative or out of range.
struct NumbersOnDevice {
  const void* data;
  uint32_t number_bytes;  // 2, 4 or 8: signed integers
  size_t count;
};

// Rows of tables. A table's rows are counted over its first `lead` dimensions.
struct RowIndex {
  RecycledVector<int64_t> rows;  // numbers of rows, each in [0, table_rows); empty: `on_device`
  std::vector<int64_t> sizes;    // replaces the first `lead` dimensions in a result's shape
  size_t lead;
  int64_t table_rows = 0;  // the number of rows of each table
  std::optional<NumbersOnDevice> on_device{};

  size_t count() const { return on_device ? on_device->count : rows.size(); }
};

// Copies numbers to `rows`, and wraps negative ones, which count from the end. Returns the first
// number, as given, that is out of range for a table of `size` rows. Requires: as many `rows`.
std::optional<int64_t> wrap_rows(std::span<const int64_t> numbers, int64_t size,
                                 std::span<int64_t> rows) noexcept;

// Returns a number that occurs more than once; nullopt if there is none.
std::optional<int64_t> repeated_row(std::span<const int64_t> rows);

}  // namespace tdcopier
