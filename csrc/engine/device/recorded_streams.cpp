// Lists the storages on which streams were recorded; a fork disarms their deleters in the child.
#include "engine/device/recorded_streams.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <pthread.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

#include "base/brief_lock.h"

namespace tdcopier {
namespace {

// The number of entries at which to look for dead ones first. An entry keeps the memory of its
// StorageImpl object, so with few of them a loop reuses memory that is still in the cache.
constexpr size_t kFirstLook = 32;

struct RecordedStorage {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  c10::DeleterFnPtr deleter;

  bool is_dead() const { return storage.use_count() == 0; }
  auto key() const { return std::pair(storage._unsafe_get_target(), deleter); }
};

struct Recorded {
  std::mutex mutex;
  std::vector<RecordedStorage> storages;  // guarded by mutex
  size_t next_look = kFirstLook;          // the number of entries at which to look for dead ones
};

Recorded& recorded();

// In the child, which has one thread. Takes no reference: for a storage that Python can see, torch
// would take the GIL. A lazy clone has the recorded memory inside.
void disarm() {
  for (const RecordedStorage& entry : recorded().storages) {
    if (entry.is_dead()) continue;
    c10::DataPtr& memory = entry.storage._unsafe_get_target()->_mutable_data_ptr_no_checks();
    const c10::DeleterFnPtr deleter =
        c10::impl::cow::is_cow_data_ptr(memory) ? memory.get_deleter() : entry.deleter;
    (void)memory.compare_exchange_deleter(deleter, &c10::detail::deleteNothing);
  }
  recorded().mutex.unlock();
}

Recorded& recorded() {
  static auto* const list = [] {
    auto* made = new Recorded();  // never destroyed: outlives every storage
    pthread_atfork([] { recorded().mutex.lock(); }, [] { recorded().mutex.unlock(); }, &disarm);
    return made;
  }();
  return *list;
}

// Forgets storages that are gone or stand in the list twice. The next look comes when the list has
// grown to twice what is left, so an entry costs the same however many there are.
void forget_dead(Recorded& list) {
  std::erase_if(list.storages, [](const RecordedStorage& entry) { return entry.is_dead(); });
  std::ranges::sort(list.storages, {}, &RecordedStorage::key);
  const auto twice = std::ranges::unique(list.storages, {}, &RecordedStorage::key);
  list.storages.erase(twice.begin(), twice.end());
  list.next_look = std::max(kFirstLook, 2 * list.storages.size());
}

}  // namespace

void leave_to_parent(const c10::Storage& memory, c10::DeleterFnPtr deleter) {
  Recorded& list = recorded();
  RecordedStorage added{memory.getWeakStorageImpl(), deleter};
  const BriefLock lock(list.mutex);
  if (list.storages.size() >= list.next_look) forget_dead(list);
  list.storages.push_back(std::move(added));
}

// Both list the memory first: a fork between the two calls finds it there.
void record_stream(const c10::Storage& memory, const c10::Stream& stream) {
  leave_to_parent(memory, memory.data_ptr().get_deleter());
  c10::impl::VirtualGuardImpl(stream.device_type())
      .recordDataPtrOnStream(memory.data_ptr(), stream);
}

void record_stream_on_pinned(const c10::Storage& memory, const c10::Stream& stream) {
  const c10::DataPtr& pinned = memory.data_ptr();
  leave_to_parent(memory, pinned.get_deleter());
  at::getHostAllocator(stream.device_type())
      ->record_event(pinned.get(), pinned.get_context(), stream);
}

}  // namespace tdcopier
