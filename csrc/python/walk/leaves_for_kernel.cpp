// Asks as little as possible: most leaves are not pinned.
#include "python/walk/leaves_for_kernel.h"

#include <c10/core/TensorImpl.h>

#include <atomic>
#include <utility>

#include "base/pack_plan.h"
#include "engine/leaves/part_storage.h"
#include "engine/moves/row_kernel.h"

namespace tdcopier {
namespace {

std::atomic<bool> g_kernel_used = true;

// Threads stage smaller ones more quickly: of 640 pinned leaves, with 128 of 11 KiB by the kernel
// and the others staged a copy took 322 us on an H200, and 295 with all of them staged.
constexpr uint64_t kLeastLeafBytes = 16 * 1024;

// Returns whether the leaf has most of its storage for itself. If not, it may make a series with
// its neighbours.
bool is_apart(const c10::StorageImpl& storage, uint64_t bytes) {
  return bytes > storage.nbytes() / 2 && PartStorage::allocation_of(storage) == &storage;
}

}  // namespace

LeavesForKernel::LeavesForKernel(c10::Device target)
    : target_(target), is_used_(g_kernel_used.load(std::memory_order_relaxed)), pinned_(target) {}

bool LeavesForKernel::take(const at::Tensor& tensor) {
  if (!is_used_) return false;
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const auto bytes = static_cast<uint64_t>(impl.numel()) * impl.itemsize();
  if (bytes < kLeastLeafBytes || bytes > kMaxPackedLeafBytes || !impl.has_storage()) return false;
  const c10::StorageImpl& storage = *impl.unsafe_storage().unsafeGetStorageImpl();
  if (!impl.is_non_overlapping_and_dense() || !is_apart(storage, bytes)) return false;
  const InPlace found = pinned_.find(storage, /*asks_driver=*/false);
  if (found == InPlace::kNo) return false;
  if (!has_kernel_) has_kernel_ = row_kernels(target_) != nullptr;
  if (!*has_kernel_) return false;
  if (found == InPlace::kRegistered) registered_.push_back(storage.data());
  bytes_ += bytes;
  return true;
}

PinnedTables LeavesForKernel::take_tables() {
  PinnedTables tables = pinned_.tables();
  tables.registered = registered_;  // a group that lost its only leaf is made again
  return tables;
}

void use_kernel_for_leaves(bool use) {
  g_kernel_used = use;
}

}  // namespace tdcopier
