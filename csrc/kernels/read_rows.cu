// Copies selected rows of tables in pinned host memory to device memory. tools/make_ptx.py compiles
// this file to read_rows_ptx.h. engine/moves/row_kernel.cpp repeats the layout of a table.
//
// Each thread copies one unit of a row at a time: the more reads are under way, the nearer the
// link is to its rate. The units of all tables are numbered one after the other.

using u32 = unsigned int;
using u64 = unsigned long long;

struct Table {
  u64 rows;  // address of row 0
  u64 to;
  long long stride_bytes;
  u32 first_unit;
  u32 units_of_row;
  u32 unit_bytes;  // 1, 2, 4, 8 or 16: all addresses are multiples of it
  u32 unused;
};

// The rows are read once: they should not take the place of other data in the caches.
template <typename Unit>
__device__ void copy(u64 from, u64 to) {
  *reinterpret_cast<Unit*>(to) = __ldcs(reinterpret_cast<const Unit*>(from));
}

extern "C" __global__ void read_rows(const Table* __restrict__ tables, u32 count,
                                     const long long* __restrict__ numbers, u32 units) {
  for (u32 unit = blockIdx.x * blockDim.x + threadIdx.x; unit < units;
       unit += gridDim.x * blockDim.x) {
    u32 low = 0;
    u32 high = count;
    while (high - low > 1) {
      const u32 middle = (low + high) / 2;
      if (tables[middle].first_unit <= unit) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const Table table = tables[low];
    const u32 place = unit - table.first_unit;
    const u32 row = place / table.units_of_row;
    const u64 in_row = static_cast<u64>(place % table.units_of_row) * table.unit_bytes;
    const u64 from = table.rows + numbers[row] * table.stride_bytes + in_row;
    const u64 to = table.to + static_cast<u64>(place) * table.unit_bytes;
    switch (table.unit_bytes) {
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
