// Where leaves are written that fill existing memory: beside a leaf table, one entry for each leaf.
#pragma once

#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/pack_plan.h"
#include "base/recycled.h"
#include "engine/leaf.h"

namespace tdcopier {

// The leaf's bytes go to `data` as the leaf table has them arrive, or they are strided: each
// element by its own way.
struct Destination {
  std::byte* data;                  // the first element
  const c10::StorageImpl* storage;  // whose memory it is; only compared, null if not known
  bool strided;
  bool pinned;            // host memory that the device writes by itself
  uint32_t first_stride;  // index of its strides in DestinationTable::strides_bytes_
};

// Destinations of one device, by the leaf's index.
class DestinationTable {
 public:
  void reserve(size_t leaves) { destinations_.reserve(leaves); }
  void add(std::byte* data, const c10::StorageImpl* storage, bool pinned);
  void add_strided(std::byte* data, const c10::StorageImpl* storage,
                   std::span<const int64_t> strides_bytes);

  size_t size() const { return destinations_.size(); }
  const Destination& operator[](size_t i) const { return destinations_[i]; }
  // (dims,). Requires: the destination is strided.
  std::span<const int64_t> strides_bytes(const Destination& destination, size_t dims) const {
    return {strides_bytes_.data() + destination.first_stride, dims};
  }

 private:
  RecycledVector<Destination> destinations_;
  RecycledVector<int64_t> strides_bytes_;
};

// What fills existing memory: leaves of one device, and where they go on another, or the same.
struct LeafPairs {
  LeafTable leaves;
  DestinationTable destinations;
};

}  // namespace tdcopier
