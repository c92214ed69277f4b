// Where leaves are written that fill existing memory: beside a leaf table, one entry for each leaf.
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
#include "engine/leaf.h"

namespace tdcopier {

// The leaf's bytes go to `data` as the leaf table has them arrive, or they are strided: each
// element by its own way. Rows of a table that are picked by number count as strided.
struct Destination {
  std::byte* data;                  // the first element
  const c10::StorageImpl* storage;  // whose memory it is; only compared, null if not known
  bool strided;
  bool pinned;                   // host memory that the device writes by itself
  uint32_t first_stride;         // index of its strides in DestinationTable::strides_bytes_
  uint32_t row_table = kNoRows;  // index in DestinationTable::row_tables_, if it is rows

  static constexpr uint32_t kNoRows = ~uint32_t{0};
  bool is_rows() const { return row_table != kNoRows; }
};

// Destinations of one device, by the leaf's index.
class DestinationTable {
 public:
  void reserve(size_t leaves) { destinations_.reserve(leaves); }
  void add(std::byte* data, const c10::StorageImpl* storage, bool pinned);
  void add_strided(std::byte* data, const c10::StorageImpl* storage,
                   std::span<const int64_t> strides_bytes);
  // The table's rows `index`, which is the same for all.
  void add_rows(std::byte* data, const c10::StorageImpl* storage, RowTable table,
                const std::shared_ptr<const RowIndex>& index);

  size_t size() const { return destinations_.size(); }
  const Destination& operator[](size_t i) const { return destinations_[i]; }
  // Requires: the destination is rows.
  const RowTable& row_table(const Destination& destination) const {
    return row_tables_[destination.row_table];
  }
  std::span<const int64_t> rows() const { return row_index_->rows; }
  // (dims,). Requires: the destination is strided, and no rows.
  std::span<const int64_t> strides_bytes(const Destination& destination, size_t dims) const {
    return {strides_bytes_.data() + destination.first_stride, dims};
  }

 private:
  RecycledVector<Destination> destinations_;
  RecycledVector<int64_t> strides_bytes_;
  std::vector<RowTable> row_tables_;
  std::shared_ptr<const RowIndex> row_index_;  // null: none is rows
};

// What fills existing memory: leaves of one device, and where they go on another, or the same.
struct LeafPairs {
  LeafTable leaves;
  DestinationTable destinations;
};

}  // namespace tdcopier
