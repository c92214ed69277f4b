// Asks once for all leaves of a storage that come together.
#include "engine/pinned_leaves.h"

namespace tdcopier {

void PinnedLeaves::end_series(LeafTable& leaves, const at::Tensor& tensor) {
  storage_ = nullptr;
  if (!leaves[leaves.size() - 1].strided && is_pinned(tensor)) leaves.note_pinned();
}

bool PinnedLeaves::is_pinned(const at::Tensor& tensor) {
  const c10::StorageImpl* const storage = storage_of(tensor);
  if (storage != asked_) {
    answer_ = tensor.is_pinned();
    asked_ = storage;
  }
  return answer_;
}

}  // namespace tdcopier
