// A map by storage. A weak reference in each entry tells whether its storage is still alive.
#include "engine/leaves/chunk_padding.h"

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <list>
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
  uint32_t checks = 0;  // that found the storage alive, while the entry was young
};

// Removes entries whose storages are gone, so that the next chunks reuse their arrays. The chunks
// of a loop are young when their storages go, and each new chunk checks two of the young. So they
// are found soon, however many others the program keeps; of these, each new chunk checks one.
struct OwnChunks {
  using Queue = std::list<const c10::StorageImpl*>;

  std::mutex mutex;
  // Guarded by mutex, as the queues. Each entry is in one of these, by its key.
  std::unordered_map<const c10::StorageImpl*, Entry> entries;
  Queue young;
  Queue old;

  void remove_expired() {
    check_first(young);
    check_first(young);
    check_first(old);
  }

  void check_first(Queue& queue) {
    constexpr uint32_t kYoungChecks = 8;
    if (queue.empty()) return;
    const auto first = queue.begin();
    const auto found = entries.find(*first);
    if (found == entries.end() || found->second.storage.expired()) {
      if (found != entries.end()) entries.erase(found);
      queue.erase(first);
    } else {
      const bool stays_young = &queue == &young && ++found->second.checks < kYoungChecks;
      Queue& next = stays_young ? young : old;
      next.splice(next.end(), queue, first);
    }
  }

  void add(const c10::StorageImpl* key, Entry entry) {
    constexpr size_t kMostYoung = 64;
    young.push_back(key);  // first: if the next line throws, a check removes it
    entries.insert_or_assign(key, std::move(entry));
    if (young.size() > kMostYoung) old.splice(old.end(), young, young.begin());
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
  chunks.add(storage.unsafeGetStorageImpl(),
             Entry{storage.getWeakStorageImpl(), storage.data(), std::move(slots)});
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
