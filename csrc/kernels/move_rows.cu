// Moves selected rows of tables, which are usually in pinned host memory, from or to contiguous
// memory of a device. tools/make_ptx.py compiles this file to move_rows_ptx.h. base/row_moves.h and
// engine/moves/row_kernel.cpp repeat the layout of the parameters.
//
// Each thread moves one unit of a row at a time: the more accesses are under way, the nearer the
// link is to its rate. The units of all tables are numbered one after the other.

using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

constexpr u32 kNoRow = ~u32{0};  // of a number that names no row
constexpr u32 kTableWords = 5;

template <u32 kWords>
struct Rows {
  u64 numbers;  // address of u32 on the device; 0: they follow the tables in `words`
  u32 tables;
  u32 units;
  u32 scatter;
  u32 unused;
  u64 words[kWords];

  // A table's words: the addresses of its row 0 and of its contiguous memory, the bytes from a row
  // to the next, the number of its first unit and (upper half) the units of a row, and the bytes of
  // a unit: 1, 2, 4, 8 or 16, of which all addresses are multiples.
  __device__ u64 of_table(u32 table, u32 word) const { return words[table * kTableWords + word]; }
  __device__ u32 first_unit(u32 table) const { return static_cast<u32>(of_table(table, 3)); }
  __device__ u32 number(u32 place) const {
    if (numbers != 0) return reinterpret_cast<const u32*>(numbers)[place];
    const u64 two = words[tables * kTableWords + place / 2];
    return static_cast<u32>(place % 2 == 0 ? two : two >> 32);
  }
};

// The rows are read once: they should not take the place of other data in the caches.
template <typename Unit>
__device__ void copy(u64 from, u64 to) {
  __stcs(reinterpret_cast<Unit*>(to), __ldcs(reinterpret_cast<const Unit*>(from)));
}

template <u32 kWords>
__device__ void move(const Rows<kWords>& rows) {
  for (u32 unit = blockIdx.x * blockDim.x + threadIdx.x; unit < rows.units;
       unit += gridDim.x * blockDim.x) {
    u32 table = 0;
    u32 end = rows.tables;
    while (end - table > 1) {
      const u32 middle = (table + end) / 2;
      if (rows.first_unit(middle) <= unit) {
        table = middle;
      } else {
        end = middle;
      }
    }
    const u32 unit_bytes = static_cast<u32>(rows.of_table(table, 4));
    const u32 units_of_row = static_cast<u32>(rows.of_table(table, 3) >> 32);
    const u32 place = unit - rows.first_unit(table);
    const u32 row = rows.number(place / units_of_row);
    if (row == kNoRow) continue;
    const u64 in_row = static_cast<u64>(place % units_of_row) * unit_bytes;
    const u64 there = rows.of_table(table, 0) + row * rows.of_table(table, 2) + in_row;
    const u64 here = rows.of_table(table, 1) + static_cast<u64>(place) * unit_bytes;
    const u64 from = rows.scatter ? here : there;
    const u64 to = rows.scatter ? there : here;
    switch (unit_bytes) {
      case 16:
        copy<uint4>(from, to);
        break;
      case 8:
        copy<u64>(from, to);
        break;
      case 4:
        copy<u32>(from, to);
        break;
      case 2:
        copy<unsigned short>(from, to);
        break;
      default:
        copy<unsigned char>(from, to);
    }
  }
}

// A launch copies all parameters, so there are smaller sizes for small batches. The largest nearly
// fills the 32,764 bytes that a kernel may have.
extern "C" __global__ void move_rows_506(const __grid_constant__ Rows<506> rows) {
  move(rows);
}
extern "C" __global__ void move_rows_2298(const __grid_constant__ Rows<2298> rows) {
  move(rows);
}
extern "C" __global__ void move_rows_4086(const __grid_constant__ Rows<4086> rows) {
  move(rows);
}

struct BadRow {
  i64 number;
  volatile u64 place;  // from 1 on; 0: there is none
};

// The entry of the last place that names a row: the row, and the place.
__device__ u64* entry_of(u64* last, u32 mask, u32 row) {
  u32 at = row * 2654435761u;
  while (true) {
    u64* const entry = last + (at++ & mask);
    const u64 before = atomicCAS(entry, 0, static_cast<u64>(row + 1) << 32);
    if (before == 0 || before >> 32 == row + 1) return entry;
  }
}

// Copies row numbers, of `number_bytes` each, to `numbers`. Wraps those that count from the end.
// Those out of range become kNoRow, and the first of them is written to `bad`. With `last`, a hash
// table of `mask` + 1 entries, so does each that occurs again later. Runs as one block.
extern "C" __global__ void number_rows(const void* index, u32 number_bytes, u32 count, i64 rows,
                                       u32* numbers, BadRow* bad, u64* last, u32 mask) {
  __shared__ u32 first_bad;
  if (threadIdx.x == 0) first_bad = kNoRow;
  if (last != nullptr) {
    for (u64 i = threadIdx.x; i <= mask; i += blockDim.x) last[i] = 0;
  }
  __syncthreads();
  const auto given = [&](u32 place) -> i64 {
    if (number_bytes == 8) return static_cast<const i64*>(index)[place];
    if (number_bytes == 4) return static_cast<const int*>(index)[place];
    return static_cast<const short*>(index)[place];
  };
  for (u32 place = threadIdx.x; place < count; place += blockDim.x) {
    const i64 number = given(place);
    const i64 row = number < 0 ? number + rows : number;
    const bool is_row = row >= 0 && row < rows;
    numbers[place] = is_row ? static_cast<u32>(row) : kNoRow;
    if (!is_row) {
      atomicMin(&first_bad, place);
    } else if (last != nullptr) {
      const u64 this_one = static_cast<u64>(row + 1) << 32 | place;
      atomicMax(entry_of(last, mask, static_cast<u32>(row)), this_one);
    }
  }
  __syncthreads();
  if (last != nullptr) {
    for (u32 place = threadIdx.x; place < count; place += blockDim.x) {
      const u32 row = numbers[place];
      if (row == kNoRow) continue;
      if (static_cast<u32>(*entry_of(last, mask, row)) != place) numbers[place] = kNoRow;
    }
  }
  if (threadIdx.x == 0 && first_bad != kNoRow) {
    bad->number = given(first_bad);
    __threadfence_system();
    bad->place = static_cast<u64>(first_bad) + 1;
  }
}
