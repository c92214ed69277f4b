// Reads selected rows of tables in pinned host memory from a device, with one kernel and no host
// thread. (Rows that host threads read: base/row_copy.h.)
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/recycled.h"
#include "base/row_copy.h"

namespace tdcopier {

// The rows of one table. The same as in kernels/read_rows.cu.
struct RowTableRead {
  uint64_t rows;  // address of row 0
  uint64_t to;    // on the device
  int64_t stride_bytes;
  uint32_t first_unit;  // units of all tables are numbered one after the other
  uint32_t units_of_row;
  uint32_t unit_bytes;  // 1, 2, 4, 8 or 16
  uint32_t unused = 0;
};

// What a device reads of one table, and how many rows. Their numbers fit in a staging buffer.
inline constexpr uint64_t kMostRowBytes = uint64_t{1} << 31;
inline constexpr size_t kMostRowsRead = 128 * 1024;

// The rows of several tables that one kernel reads.
class RowReads {
 public:
  explicit RowReads(std::span<const int64_t> numbers) : numbers_(numbers) {}

  // Adds rows that go to `to` one after the other. Returns false, and adds nothing, if these are
  // more than one kernel reads, or if the request would be longer. A first table fits. Requires:
  // at most kMostRowsRead rows, of at most kMostRowBytes.
  bool add(const std::byte* table, RowLayout layout, std::byte* to, uint64_t most_request_bytes);

  // Returns the bytes of what the kernel has to know, which write() writes.
  uint64_t request_bytes() const {
    return tables_.size() * sizeof(RowTableRead) + numbers_.size_bytes();
  }
  void write(std::byte* request) const;

  // Returns the bytes of all rows.
  uint64_t bytes() const { return bytes_; }

  // Enqueues the reads. `request`: what write() wrote, in the device's memory. Never blocks.
  // Requires: reads_rows() of the device; the stream is the current one. Throws: c10::Error, if the
  // device refuses work.
  void enqueue(const c10::Stream& stream, const std::byte* request) const;

 private:
  std::span<const int64_t> numbers_;
  RecycledVector<RowTableRead> tables_;
  uint32_t units_ = 0;
  uint64_t bytes_ = 0;
};

// Returns whether the device reads rows itself. The first call for a device compiles the kernel.
bool reads_rows(c10::Device device);

// Turns the kernel off, or on again. On devices that have no kernel, and in tests, one transfer for
// each row stands in for it as long as this is on; it is off for them at first.
void use_row_kernel(bool use);

}  // namespace tdcopier
