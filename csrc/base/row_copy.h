// Reads rows of a table by their numbers and writes them one behind the other, or the reverse.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tdcopier {

// Memory that holds rows: row i is `row_bytes` from `i * stride_bytes` on.
struct RowLayout {
  int64_t stride_bytes;
  uint64_t row_bytes;  // at least 1
};

struct RowTable {
  RowLayout layout;
  int64_t rows;  // it has
};

// The rows `rows`, one behind the other, are so many bytes: of these, [begin, end) are written to
// `to`. Requires: the rows exist. Thread: any.
void gather_rows(const std::byte* table, RowLayout layout, std::span<const int64_t> rows,
                 uint64_t begin, uint64_t end, std::byte* to) noexcept;

// The reverse: `from` has bytes [begin, end) of them. Of a row that is named twice, the last one
// stays.
void scatter_rows(std::byte* table, RowLayout layout, std::span<const int64_t> rows, uint64_t begin,
                  uint64_t end, const std::byte* from) noexcept;

}  // namespace tdcopier
