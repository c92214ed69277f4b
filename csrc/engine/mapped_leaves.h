// Host leaves that lie in memory-mapped files: to read them may be to wait for a disk.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace tdcopier {

// Workers share the reading of mapped files in pieces of this size. Each faults its own pages in
// and reads from the beginning to the end, which the kernel's read-ahead follows.
inline constexpr uint64_t kMappedWindowBytes = 1024 * 1024;

// Is it a file that torch has mapped? Shared memory is not one.
bool is_mapped_file(const c10::StorageImpl& storage);

// The same of one storage after the other, most of which are freed in the same way.
class MappedFiles {
 public:
  bool has(const c10::StorageImpl& storage) {
    const c10::DeleterFnPtr deleter = storage.data_ptr().get_deleter();
    if (deleter == ordinary_) return false;
    if (is_mapped_file(storage)) return true;
    // What it does tells files, but not files from shared memory: that is asked each time.
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

// Those of one tree's host leaves that are mapped. Remembers where a few of them are.
class MappedLeaves {
 public:
  // `reach` is all memory from a leaf's first byte to its last.
  void note(std::span<const std::byte> reach) {
    if (count_ < kMostAsked) reaches_[count_] = reach;
    ++count_;
  }
  bool empty() const { return count_ == 0; }

  // Is one of them not in memory yet? Asks for a few: whoever reads one of a tree reads them all.
  // Rows that are far apart in a file are taken for absent without asking for all that is between.
  bool wait_for_disk() const;

 private:
  static constexpr size_t kMostAsked = 4;
  std::array<std::span<const std::byte>, kMostAsked> reaches_{};
  size_t count_ = 0;
};

}  // namespace tdcopier
