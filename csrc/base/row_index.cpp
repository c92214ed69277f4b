// Checks row numbers without branches; only a failed check makes a second pass to find the number.
#include "base/row_index.h"

#include <algorithm>

namespace tdcopier {

std::optional<int64_t> wrap_rows(std::span<int64_t> rows, int64_t size) noexcept {
  bool out_of_range = false;
  for (const int64_t row : rows) out_of_range |= row < -size || row >= size;
  if (out_of_range) {
    for (const int64_t row : rows) {
      if (row < -size || row >= size) return row;
    }
  }
  for (int64_t& row : rows) row += row < 0 ? size : 0;
  return std::nullopt;
}

std::optional<int64_t> repeated_row(std::span<const int64_t> rows) {
  const auto not_above = [](int64_t a, int64_t b) { return a >= b; };
  if (std::ranges::adjacent_find(rows, not_above) == rows.end()) return std::nullopt;
  RecycledVector<int64_t> sorted(rows.begin(), rows.end());
  std::ranges::sort(sorted);
  const auto found = std::ranges::adjacent_find(sorted);
  return found == sorted.end() ? std::nullopt : std::optional(*found);
}

}  // namespace tdcopier
