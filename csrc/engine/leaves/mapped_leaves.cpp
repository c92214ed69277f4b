// Recognises mapped storages by their deleter.
#include "engine/leaves/mapped_leaves.h"

#include <ATen/MapAllocator.h>

#include <algorithm>

#include "base/residency.h"

namespace tdcopier {

bool is_mapped_file(const c10::StorageImpl& storage) {
  const at::MapAllocator* mapped = at::MapAllocator::fromDataPtr(storage.data_ptr());
  return mapped != nullptr && (mapped->flags() & at::ALLOCATOR_MAPPED_SHAREDMEM) == 0;
}

bool MappedFiles::is_mapped_memory(const c10::StorageImpl& storage) {
  return at::MapAllocator::fromDataPtr(storage.data_ptr()) != nullptr;
}

bool MappedLeaves::would_wait_for_disk() const {
  constexpr size_t kMaxCheckedBytes = 16 << 20;  // the kernel checks page by page
  const auto last = reaches_.begin() + static_cast<ptrdiff_t>(std::min(count_, kMaxChecked));
  return !std::all_of(reaches_.begin(), last, [](std::span<const std::byte> reach) {
    return reach.size() <= kMaxCheckedBytes && is_resident(reach.data(), reach.size());
  });
}

}  // namespace tdcopier
