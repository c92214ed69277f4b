// Checks row numbers without branches; only a failed check makes a second pass to find the number.
#include "base/row_index.h"

#include <algorithm>

namespace tdcopier {

std::optional<int64_t> wrap_rows(std::span<const int64_t> numbers, int64_t size,
                                 std::span<int64_t> rows) noexcept {
  int64_t outside = 0;  // negative if a row is out of range
  for (size_t i = 0; i < numbers.size(); ++i) {
    const int64_t row = numbers[i] + (size & (numbers[i] >> 63));
    outside |= row | (size - 1 - row);
    rows[i] = row;
  }
  if (outside >= 0) return std::nullopt;
  return *std::ranges::find_if(numbers,
                               [size](int64_t number) { return number < -size || number >= size; });
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
