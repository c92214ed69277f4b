// A map by storage. A weak reference in each entry tells whether its storage is still alive.
#include "engine/leaves/chunk_padding.h"

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace tdcopier {
namespace {

using Slots = std::shared_ptr<const RecycledVector<SlotRange>>;

struct Entry {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // so that its address is not reused
  const void* memory;                                 // changes when the storage is resized
  Slots slots;
};

struct OwnChunks {
  std::mutex mutex;
  // Guarded by mutex. `to_check` has each entry once, the one that was checked last at its end.
  std::unordered_map<const c10::StorageImpl*, Entry> entries;
  std::deque<const c10::StorageImpl*> to_check;

  // Removes entries whose storages are gone, so that the next chunks reuse their arrays. Checks two
  // for each chunk that is added: there are never many more entries than live chunks.
  void remove_expired() {
    for (size_t i = std::min<size_t>(2, to_check.size()); i > 0; --i) {
      const c10::StorageImpl* const oldest = to_check.front();
      to_check.pop_front();
      const auto found = entries.find(oldest);
      if (found->second.storage.expired()) {
        entries.erase(found);
      } else {
        to_check.push_back(oldest);
      }
    }
  }
};

OwnChunks& own_chunks() {
  static auto* const made = new OwnChunks();
  return *made;
}

Slots slots_of(const c10::StorageImpl* storage) {
  auto& chunks = own_chunks();
  const std::lock_guard lock(chunks.mutex);
  const auto found = chunks.entries.find(storage);
  if (found == chunks.entries.end() || found->second.storage.expired()) return nullptr;
  return found->second.memory == storage->data() ? found->second.slots : nullptr;
}

}  // namespace

void remember_chunk(const c10::Storage& storage, uint64_t shift, const PackPlan& plan,
                    const ChunkPlan& chunk, const LeafTable& leaves) {
  const std::byte* const first = static_cast<const std::byte*>(storage.data()) + shift;
  OwnChunks& chunks = own_chunks();
  {
    const std::lock_guard lock(chunks.mutex);
    chunks.remove_expired();
  }
  auto slots = std::make_shared<RecycledVector<SlotRange>>();
  slots->reserve(chunk.last - chunk.first);
  for (uint32_t i = chunk.first; i < chunk.last; ++i) {
    const std::byte* const begin = first + plan.slots[plan.order[i]].offset;
    const uint64_t bytes = leaves[plan.order[i]].bytes;
    if (bytes != 0) slots->push_back({begin, begin + bytes});
  }
  const std::lock_guard lock(chunks.mutex);
  const c10::StorageImpl* const key = storage.unsafeGetStorageImpl();
  const bool is_new = chunks.entries
                          .insert_or_assign(key, Entry{storage.getWeakStorageImpl(), storage.data(),
                                                       std::move(slots)})
                          .second;
  if (is_new) chunks.to_check.push_back(key);
}

bool Padding::has(const c10::StorageImpl* storage, const std::byte* from, const std::byte* to) {
  if (storage != storage_) {
    storage_ = storage;
    slots_ = slots_of(storage);
    next_ = 0;
  }
  if (slots_ == nullptr) return false;
  const RecycledVector<SlotRange>& slots = *slots_;
  while (next_ < slots.size() && slots[next_].end < from) ++next_;
  return next_ + 1 < slots.size() && slots[next_].end == from && slots[next_ + 1].begin == to;
}

}  // namespace tdcopier
