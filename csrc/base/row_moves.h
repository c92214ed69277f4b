// What a device's kernels have to know to number rows, and to move them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace tdcopier {

// In the numbers that a device has made: names no row.
inline constexpr uint32_t kNoRow = std::numeric_limits<uint32_t>::max();

// Selected rows of one table, and their contiguous memory on the device. All addresses are
// multiples of the unit. The layout is that of kernels/move_rows.cu.
struct RowTableMove {
  uint64_t rows;  // address of row 0
  uint64_t values;
  int64_t stride_bytes;  // from a row to the next
  uint32_t first_unit;   // units of all tables are numbered one after the other
  uint32_t units_of_row;
  uint64_t unit_bytes;  // 1, 2, 4, 8 or 16

  uint64_t row_bytes() const { return units_of_row * unit_bytes; }
};

// One launch. The numbers are on the host, and are read in the call, or they are made by a
// RowNumbering on the device.
struct RowMove {
  const RowTableMove* tables;
  size_t table_count;
  const int64_t* numbers;  // null: on_device
  const uint32_t* numbers_on_device;
  size_t number_count;
  uint32_t units;
  bool scatter;  // from the values to the rows
};

// Written by a device, in pinned memory.
struct BadRow {
  int64_t number;           // as given
  volatile uint64_t place;  // in the index, from 1 on; 0: no number is out of range
};

// Copies numbers that are on the device, and wraps those that count from the end. Those out of
// range become kNoRow, and the first of them is written to `bad`. With `last`, so does each number
// that occurs again later.
struct RowNumbering {
  const void* index;
  uint32_t number_bytes;  // 2, 4 or 8: signed integers
  uint32_t count;
  int64_t rows;  // of a table
  uint32_t* numbers;
  BadRow* bad;
  uint64_t* last;      // null: numbers may repeat
  uint32_t last_mask;  // `last` has this many entries and one more: a power of two, above `count`
};

}  // namespace tdcopier
