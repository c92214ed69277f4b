// Host leaves that a device can read where they are: large pinned ones, and small ones that come
// one after the other from a pinned storage.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>

#include "engine/leaf.h"

namespace tdcopier {

// To ask whether memory is pinned takes a microsecond: it is asked of large leaves, and of a
// storage from which a series of small ones comes that is as large together. Other small leaves are
// packed wherever they are.
class PinnedLeaves {
 public:
  // The last leaf of the table, which is of the host, is this tensor. Requires: its storage and
  // those of the leaves before stay alive until the last one was noted.
  void note(LeafTable& leaves, const at::Tensor& tensor) {
    const Leaf& leaf = leaves[leaves.size() - 1];
    if (leaf.bytes == 0) return;
    if (leaf.strided || leaf.bytes > kMaxPackedLeafBytes) return end_series(leaves, tensor);
    const c10::StorageImpl* const storage = storage_of(tensor);
    if (storage != storage_) {
      storage_ = storage;
      first_ = static_cast<uint32_t>(leaves.size() - 1);
      bytes_ = 0;
    }
    bytes_ += leaf.bytes;
    if (bytes_ > kMaxPackedLeafBytes && is_pinned(tensor)) leaves.note_pinned_series(first_);
  }

 private:
  static const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  }
  void end_series(LeafTable& leaves, const at::Tensor& tensor) {
    storage_ = nullptr;
    if (!leaves[leaves.size() - 1].strided && is_pinned(tensor)) leaves.note_pinned();
  }
  bool is_pinned(const at::Tensor& tensor) {
    const c10::StorageImpl* const storage = storage_of(tensor);
    if (storage != asked_) {
      answer_ = tensor.is_pinned();
      asked_ = storage;
    }
    return answer_;
  }

  const c10::StorageImpl* storage_ = nullptr;  // of the series that the last leaf ends
  uint32_t first_ = 0;                         // the first leaf of the series
  uint64_t bytes_ = 0;                         // of its leaves
  const c10::StorageImpl* asked_ = nullptr;    // the storage that was asked last
  bool answer_ = false;
};

}  // namespace tdcopier
