// A map by storage. A weak reference to each says whether it still is the one that was remembered.
#include "engine/own_chunks.h"

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace tdcopier {
namespace {

struct Entry {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // so that no other has its address
  const void* memory;                                 // resizing it would move it
  std::shared_ptr<const ChunkSlots> slots;
};

struct OwnChunks {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, Entry> entries;  // guarded by mutex, as the next
  size_t swept_at = 64;  // when there are as many, those that are gone are swept out
};

OwnChunks& own_chunks() {
  static auto* const made = new OwnChunks();
  return *made;
}

}  // namespace

bool ChunkSlots::is_padding(const std::byte* from, const std::byte* to, size_t& cursor) const {
  if (from < begin_) return false;
  const auto first = static_cast<uint64_t>(from - begin_);
  const auto last = static_cast<uint64_t>(to - begin_);
  while (cursor < slots_.size() && slots_[cursor].end < first) ++cursor;
  return cursor + 1 < slots_.size() && slots_[cursor].end == first &&
         slots_[cursor + 1].begin == last;
}

void remember_chunk(const c10::Storage& storage, uint64_t shift, const PackPlan& plan,
                    const ChunkPlan& chunk, const LeafTable& leaves) {
  RecycledVector<SlotRange> slots;
  slots.reserve(chunk.last - chunk.first);
  for (uint32_t i = chunk.first; i < chunk.last; ++i) {
    const uint64_t begin = plan.slots[plan.order[i]].offset;
    const uint64_t bytes = leaves[plan.order[i]].bytes;
    if (bytes != 0) slots.push_back({begin, begin + bytes});
  }
  auto known = std::make_shared<const ChunkSlots>(
      static_cast<const std::byte*>(storage.data()) + shift, std::move(slots));
  auto& [mutex, entries, swept_at] = own_chunks();
  const std::lock_guard lock(mutex);
  if (entries.size() >= swept_at) {
    std::erase_if(entries, [](const auto& entry) { return entry.second.storage.expired(); });
    swept_at = std::max<size_t>(64, 2 * entries.size());
  }
  entries.insert_or_assign(storage.unsafeGetStorageImpl(),
                           Entry{storage.getWeakStorageImpl(), storage.data(), std::move(known)});
}

std::shared_ptr<const ChunkSlots> slots_of(const c10::StorageImpl* storage) {
  auto& chunks = own_chunks();
  const std::lock_guard lock(chunks.mutex);
  const auto found = chunks.entries.find(storage);
  if (found == chunks.entries.end() || found->second.storage.expired()) return nullptr;
  return found->second.memory == storage->data() ? found->second.slots : nullptr;
}

}  // namespace tdcopier
