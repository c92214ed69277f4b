// Moves selected rows between tables, usually in pinned host memory, and memory of a device, by the
// device itself: with one kernel and no host thread. (Rows that host threads move:
// base/row_copy.h.)
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/recycled.h"
#include "base/row_copy.h"
#include "base/row_moves.h"

namespace tdcopier {

// What a device moves of one table, and how many rows a table may have: kernels count them in 32
// bits.
inline constexpr uint64_t kMostRowBytes = uint64_t{1} << 31;
inline constexpr int64_t kMostTableRows = kNoRow - 1;

// The kernels of a device type. Both enqueue work on a stream, and never block. They throw
// c10::Error if the device refuses it.
struct RowKernels {
  void (*move)(const c10::Stream& stream, const RowMove& move);
  void (*number)(const c10::Stream& stream, const RowNumbering& numbering);
};

// Sets the kernels of a device type: for the simulation. They live as long as the process.
void set_row_kernels(c10::DeviceType type, const RowKernels& kernels);

// Returns the kernels of a device; null if it has none, or they are turned off. The first call for
// a CUDA device compiles them.
const RowKernels* row_kernels(c10::Device device);

// Turns them off, or on again, for tests and comparisons.
void use_row_kernels(bool use);

// The rows of several tables, all with the same numbers.
class RowMoves {
 public:
  // On the host: in [0, number of rows).
  explicit RowMoves(std::span<const int64_t> numbers)
      : numbers_(numbers.data()), count_(numbers.size()) {}
  // On the device: made by a RowNumbering.
  RowMoves(const uint32_t* numbers, size_t count) : on_device_(numbers), count_(count) {}

  // Adds rows, of at most kMostRowBytes in all, whose values are contiguous at `values`.
  void add(const std::byte* table, RowLayout layout, const std::byte* values);

  // Enqueues the moves; `scatter`: from the values to the tables. Returns the number of kernels.
  // Requires: the stream is the current one of its device.
  size_t enqueue(const RowKernels& kernels, const c10::Stream& stream, bool scatter) const;

  // Returns the number of kernels that enqueue() needs.
  size_t launches() const;
  // Returns the bytes of all rows.
  uint64_t bytes() const { return bytes_; }

 private:
  template <typename Launch>
  size_t for_each_launch(const Launch& launch) const;

  const int64_t* numbers_ = nullptr;
  const uint32_t* on_device_ = nullptr;
  const size_t count_;
  RecycledVector<RowTableMove> tables_;  // first_unit is not set yet
  uint64_t bytes_ = 0;
};

}  // namespace tdcopier
