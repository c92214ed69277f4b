// Finds host leaves in memory-mapped files: reading them may wait for a disk.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace tdcopier {

// Workers read mapped files in pieces of this size. Each faults in its own pages and reads them
// from first to last, which the kernel's read-ahead follows.
inline constexpr uint64_t kMappedWindowBytes = 1024 * 1024;

// Returns whether the storage is a file that torch has mapped. Shared memory is not one.
bool is_mapped_file(const c10::StorageImpl& storage);

// Tells which of many storages are mapped files. Remembers a deleter that mapped memory does not
// have, since most storages share one.
class MappedFiles {
 public:
  bool has(const c10::StorageImpl& storage) {
    const c10::DeleterFnPtr deleter = storage.data_ptr().get_deleter();
    if (deleter == ordinary_) return false;
    if (is_mapped_file(storage)) return true;
    // The deleter tells mapped memory, but not files from shared memory: those are checked each
    // time.
    if (!is_mapped_memory(storage)) ordinary_ = deleter;
    return false;
  }
  // Requires: a tensor with storage.
  bool has(const at::Tensor& tensor) {
    return has(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  }

 private:
  static bool is_mapped_memory(const c10::StorageImpl& storage);

  c10::DeleterFnPtr ordinary_ = nullptr;
};

// The mapped ones among a tree's host leaves. Remembers the addresses of a few of them.
class MappedLeaves {
 public:
  // Adds a leaf. `reach` is all memory from its first byte to its last.
  void note(std::span<const std::byte> reach) {
    if (count_ < kMaxChecked) reaches_[count_] = reach;
    ++count_;
  }
  bool empty() const { return count_ == 0; }

  // Returns whether a leaf is not in memory yet. Checks only a few: the leaves of a tree are
  // usually read together. Rows that are far apart in a file count as absent, without a check of
  // all pages between them.
  bool would_wait_for_disk() const;

 private:
  static constexpr size_t kMaxChecked = 4;
  std::array<std::span<const std::byte>, kMaxChecked> reaches_{};
  size_t count_ = 0;
};

}  // namespace tdcopier
