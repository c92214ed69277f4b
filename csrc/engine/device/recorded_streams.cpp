// Lists the storages on which streams were recorded; a fork disarms their deleters in the child.
#include "engine/device/recorded_streams.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/StorageImpl.h>
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

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct Recorded {
  std::mutex mutex;
  std::vector<WeakStorage> storages;  // guarded by mutex
  size_t next_look = 1024;            // the number of entries at which to look for dead ones
};

Recorded& recorded();

// In the child, which has one thread. Takes no reference: for a storage that Python can see, torch
// would take the GIL.
void disarm() {
  for (const WeakStorage& storage : recorded().storages) {
    if (storage.use_count() == 0) continue;
    c10::DataPtr& memory = storage._unsafe_get_target()->_mutable_data_ptr_no_checks();
    (void)memory.compare_exchange_deleter(memory.get_deleter(), &c10::detail::deleteNothing);
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
  const auto address = [](const WeakStorage& storage) { return storage._unsafe_get_target(); };
  std::erase_if(list.storages, [](const WeakStorage& storage) { return storage.use_count() == 0; });
  std::ranges::sort(list.storages, {}, address);
  const auto twice = std::ranges::unique(list.storages, {}, address);
  list.storages.erase(twice.begin(), twice.end());
  list.next_look = std::max<size_t>(1024, 2 * list.storages.size());
}

}  // namespace

void leave_to_parent(const c10::Storage& memory) {
  Recorded& list = recorded();
  WeakStorage added = memory.getWeakStorageImpl();
  const BriefLock lock(list.mutex);
  if (list.storages.size() >= list.next_look) forget_dead(list);
  list.storages.push_back(std::move(added));
}

// Both list the memory first: a fork between the two calls finds it there.
void record_stream(const c10::Storage& memory, const c10::Stream& stream) {
  leave_to_parent(memory);
  c10::impl::VirtualGuardImpl(stream.device_type())
      .recordDataPtrOnStream(memory.data_ptr(), stream);
}

void record_stream_on_pinned(const c10::Storage& memory, const c10::Stream& stream) {
  leave_to_parent(memory);
  const c10::DataPtr& pinned = memory.data_ptr();
  at::getHostAllocator(stream.device_type())
      ->record_event(pinned.get(), pinned.get_context(), stream);
}

}  // namespace tdcopier
