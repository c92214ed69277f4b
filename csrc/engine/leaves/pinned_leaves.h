// Finds host leaves that a device can read in place: large pinned ones, and series of small ones in
// one pinned allocation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>

#include "engine/device/pinned_ranges.h"
#include "engine/leaves/leaf.h"
#include "engine/leaves/part_storage.h"

namespace tdcopier {

// torch takes a microsecond to tell whether memory is pinned. So only large leaves are checked, and
// allocations with a series of small leaves that is as large in total. Other small leaves are
// packed, pinned or not.
class PinnedLeaves {
 public:
  // Looks at the last leaf of the table, which is this host tensor. Requires: its storage and those
  // of the leaves before stay alive until the last call.
  void note(LeafTable& leaves, const at::Tensor& tensor) {
    const Leaf& leaf = leaves[leaves.size() - 1];
    if (leaf.bytes == 0) return;
    if (leaf.strided || leaf.bytes > kMaxPackedLeafBytes) return end_series(leaves, tensor);
    const void* const allocation = allocation_of(tensor);
    if (allocation != allocation_) {
      allocation_ = allocation;
      first_ = static_cast<uint32_t>(leaves.size() - 1);
      bytes_ = 0;
    }
    bytes_ += leaf.bytes;
    if (bytes_ > kMaxPackedLeafBytes && is_leaf_pinned(leaf, tensor)) {
      leaves.note_pinned_series(first_);
    }
  }

 private:
  static const void* allocation_of(const at::Tensor& tensor) {
    return PartStorage::allocation_of(
        *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  }
  void end_series(LeafTable& leaves, const at::Tensor& tensor) {
    allocation_ = nullptr;
    const Leaf& leaf = leaves[leaves.size() - 1];
    if (!leaf.strided && is_leaf_pinned(leaf, tensor)) leaves.note_pinned();
  }
  // An allocation is pinned as a whole, or not at all.
  bool is_leaf_pinned(const Leaf& leaf, const at::Tensor& tensor) {
    const void* const allocation = allocation_of(tensor);
    if (allocation != asked_) {
      answer_ = is_pinned({static_cast<const std::byte*>(leaf.data), leaf.bytes});
      asked_ = allocation;
    }
    return answer_;
  }

  const void* allocation_ = nullptr;  // of the series that the last leaf belongs to
  uint32_t first_ = 0;                // the first leaf of the series
  uint64_t bytes_ = 0;                // of the series
  const void* asked_ = nullptr;       // the allocation that was checked last
  bool answer_ = false;
};

}  // namespace tdcopier
