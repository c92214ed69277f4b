// Gathers rows of a table by number into contiguous bytes, and scatters them back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tdcopier {

// The layout of a table: row i is `row_bytes` bytes from `i * stride_bytes` on.
struct RowLayout {
  int64_t stride_bytes;
  uint64_t row_bytes;  // at least 1
};

struct RowTable {
  RowLayout layout;
  int64_t rows;  // the number of rows
};

// Writes bytes [begin, end) of the concatenated rows `rows` to `to`. Requires: the rows exist.
// Thread: any.
void gather_rows(const std::byte* table, RowLayout layout, std::span<const int64_t> rows,
                 uint64_t begin, uint64_t end, std::byte* to) noexcept;

// The reverse: writes bytes [begin, end) of the concatenated rows, which are at `from`, to the
// table. If a row is named twice, the last one wins.
void scatter_rows(std::byte* table, RowLayout layout, std::span<const int64_t> rows, uint64_t begin,
                  uint64_t end, const std::byte* from) noexcept;

}  // namespace tdcopier
