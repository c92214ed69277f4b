// The existing memory that leaves are copied into: a table beside the leaf table, one entry for
// each leaf.
#pragma once

#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/pack_plan.h"
#include "base/recycled.h"
#include "base/row_copy.h"
#include "base/row_index.h"
#include "engine/leaves/leaf.h"

namespace tdcopier {

// The destination of one leaf. It is contiguous, with bytes in the order in which they arrive, or
// strided: each element is written by its strides. Rows selected by number count as strided.
struct Destination {
  std::byte* data;                  // the first element
  const c10::StorageImpl* storage;  // that owns the memory; only compared, null if not known
  bool strided;
  bool pinned;                   // host memory that the device can write directly
  uint32_t first_stride;         // index of its strides in DestinationTable::strides_bytes_
  uint32_t row_table = kNoRows;  // index in DestinationTable::row_tables_, if it is rows

  static constexpr uint32_t kNoRows = ~uint32_t{0};
  bool is_rows() const { return row_table != kNoRows; }
};

// The destinations on one device, by leaf index.
class DestinationTable {
 public:
  void reserve(size_t leaves) { destinations_.reserve(leaves); }
  void add(std::byte* data, const c10::StorageImpl* storage, bool pinned);
  void add_strided(std::byte* data, const c10::StorageImpl* storage,
                   std::span<const int64_t> strides_bytes);
  // Adds the rows `index` of `table`. Requires: all calls pass the same `index`.
  void add_rows(std::byte* data, const c10::StorageImpl* storage, RowTable table,
                const std::shared_ptr<const RowIndex>& index);

  size_t size() const { return destinations_.size(); }
  const Destination& operator[](size_t i) const { return destinations_[i]; }
  // Requires: destination.is_rows().
  const RowTable& row_table(const Destination& destination) const {
    return row_tables_[destination.row_table];
  }
  std::span<const int64_t> rows() const { return row_index_->rows; }
  const std::shared_ptr<const RowIndex>& row_index() const { return row_index_; }  // null: no rows
  // (dims,). Requires: the destination is strided, and not rows.
  std::span<const int64_t> strides_bytes(const Destination& destination, size_t dims) const {
    return {strides_bytes_.data() + destination.first_stride, dims};
  }

 private:
  RecycledVector<Destination> destinations_;
  RecycledVector<int64_t> strides_bytes_;
  std::vector<RowTable> row_tables_;
  std::shared_ptr<const RowIndex> row_index_;  // null: no destination is rows
};

// Leaves of one device, and their destinations on the same or another device.
struct LeafPairs {
  LeafTable leaves;
  DestinationTable destinations;
};

}  // namespace tdcopier
