// Gathers move short rows as fixed-size values and long rows with streaming stores, and prefetch
// the rows that come next.
#include "base/row_copy.h"

#include <algorithm>
#include <cstring>

#include "base/cache_line.h"
#include "base/streaming_copy.h"

namespace tdcopier {
namespace {

// Rows are scattered in memory, so this many are prefetched at a time.
constexpr size_t kRowsAhead = 12;

// Once a longer row has begun, the processor's own prefetching reads the rest.
constexpr size_t kFetchedBytes = 4 * kLineBytes;

// For shorter rows, streaming stores cost more than they save.
constexpr uint64_t kStreamedRowBytes = 8 * 1024;

TDCOPIER_PREFETCH void fetch(const std::byte* row, uint64_t bytes) {
  prefetch_lines(row, std::min(bytes, kFetchedBytes));
}

template <typename Table>
Table* row_at(Table* table, RowLayout layout, int64_t row) {
  return table + row * layout.stride_bytes;
}

// Calls move(address of row i, i) for whole rows [first, last).
template <typename Table, typename Move>
inline void each_row(Table* table, RowLayout layout, std::span<const int64_t> rows, size_t first,
                     size_t last, const Move& move) {
  const size_t fetched = last > kRowsAhead ? last - kRowsAhead : 0;
  size_t i = first;
  for (; i < fetched; ++i) {
    fetch(row_at(table, layout, rows[i + kRowsAhead]), layout.row_bytes);
    move(row_at(table, layout, rows[i]), i);
  }
  for (; i < last; ++i) move(row_at(table, layout, rows[i]), i);
}

// Returns how many rows from `first` on are adjacent in memory.
size_t adjoining(RowLayout layout, std::span<const int64_t> rows, size_t first, size_t last) {
  if (layout.stride_bytes != static_cast<int64_t>(layout.row_bytes)) return 1;
  size_t i = first + 1;
  while (i < last && rows[i] == rows[i - 1] + 1) ++i;
  return i - first;
}

template <uint64_t kBytes>
void gather_fixed(const std::byte* table, RowLayout layout, std::span<const int64_t> rows,
                  size_t first, size_t last, std::byte* to) {
  each_row(table, layout, rows, first, last, [&](const std::byte* row, size_t i) {
    std::memcpy(to + (i - first) * kBytes, row, kBytes);  // constant size: no call
  });
}

void gather_large(const std::byte* table, RowLayout layout, std::span<const int64_t> rows,
                  size_t first, size_t last, std::byte* to) {
  for (size_t i = first; i < last;) {
    const size_t count = adjoining(layout, rows, i, last);
    if (i + count < last) fetch(row_at(table, layout, rows[i + count]), layout.row_bytes);
    copy_streaming(to + (i - first) * layout.row_bytes, row_at(table, layout, rows[i]),
                   count * layout.row_bytes);
    i += count;
  }
  end_streaming();
}

void gather_whole(const std::byte* table, RowLayout layout, std::span<const int64_t> rows,
                  size_t first, size_t last, std::byte* to) {
  switch (layout.row_bytes) {
    case 1:
      return gather_fixed<1>(table, layout, rows, first, last, to);
    case 2:
      return gather_fixed<2>(table, layout, rows, first, last, to);
    case 4:
      return gather_fixed<4>(table, layout, rows, first, last, to);
    case 8:
      return gather_fixed<8>(table, layout, rows, first, last, to);
    case 16:
      return gather_fixed<16>(table, layout, rows, first, last, to);
    case 32:
      return gather_fixed<32>(table, layout, rows, first, last, to);
    case 64:
      return gather_fixed<64>(table, layout, rows, first, last, to);
    default:
      break;
  }
  if (layout.row_bytes >= kStreamedRowBytes) {
    return gather_large(table, layout, rows, first, last, to);
  }
  each_row(table, layout, rows, first, last, [&](const std::byte* row, size_t i) {
    std::memcpy(to + (i - first) * layout.row_bytes, row, layout.row_bytes);
  });
}

// Splits bytes [begin, end) of the rows into the end of one row, whole rows, and the beginning of
// another. Calls part(index in the list of rows, first byte in the row, bytes, place) and
// whole(first, last, place).
template <typename Part, typename Whole>
void split(RowLayout layout, uint64_t begin, uint64_t end, const Part& part, const Whole& whole) {
  const uint64_t bytes = layout.row_bytes;
  uint64_t at = begin;
  if (at % bytes != 0) {
    const uint64_t here = std::min(end, at / bytes * bytes + bytes) - at;
    part(at / bytes, at % bytes, here, uint64_t{0});
    at += here;
  }
  const uint64_t last = end / bytes;
  if (at / bytes < last) {
    whole(at / bytes, last, at - begin);
    at = last * bytes;
  }
  if (at < end) part(at / bytes, uint64_t{0}, end - at, at - begin);
}

}  // namespace

void gather_rows(const std::byte* table, RowLayout layout, std::span<const int64_t> rows,
                 uint64_t begin, uint64_t end, std::byte* to) noexcept {
  split(
      layout, begin, end,
      [&](size_t i, uint64_t first, uint64_t bytes, uint64_t place) {
        std::memcpy(to + place, row_at(table, layout, rows[i]) + first, bytes);
      },
      [&](size_t first, size_t last, uint64_t place) {
        gather_whole(table, layout, rows, first, last, to + place);
      });
}

void scatter_rows(std::byte* table, RowLayout layout, std::span<const int64_t> rows, uint64_t begin,
                  uint64_t end, const std::byte* from) noexcept {
  split(
      layout, begin, end,
      [&](size_t i, uint64_t first, uint64_t bytes, uint64_t place) {
        std::memcpy(row_at(table, layout, rows[i]) + first, from + place, bytes);
      },
      [&](size_t first, size_t last, uint64_t place) {
        for (size_t i = first; i < last;) {
          const size_t count = adjoining(layout, rows, i, last);
          std::memcpy(row_at(table, layout, rows[i]), from + place + (i - first) * layout.row_bytes,
                      count * layout.row_bytes);
          i += count;
        }
      });
}

}  // namespace tdcopier
