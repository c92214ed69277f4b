// Implements the list of released sources that wait for the GIL.
#include "python/walk/sources.h"

#include <ATen/MapAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/device/thread_pools.h"
#include "python/runtime/interrupts.h"
#include "python/runtime/torch_tensor.h"

namespace tdcopier {
namespace {

struct Returned;
Returned& returned();

// The objects and the memory that one copy kept.
struct Kept {
  RecycledVector<PyObject*> objects;
  RecycledVector<c10::Storage> memory;
};

struct Returned {
  std::mutex mutex;
  std::vector<Kept> copies;       // guarded by mutex
  std::atomic<bool> any = false;  // for a check without the lock
  std::atomic<bool> ending = false;
};

Returned& returned() {
  static auto* list = [] {
    auto* made = new Returned();  // outlives the workers
    // A worker may be in release() when another thread forks: the child must find the list
    // unlocked.
    pthread_atfork([] { returned().mutex.lock(); }, [] { returned().mutex.unlock(); },
                   [] { returned().mutex.unlock(); });
    return made;
  }();
  return *list;
}

using Memory = std::vector<at::DataPtr>;

// Freeing less takes no longer than waking a worker.
constexpr size_t kMuchBytes = 256 * 1024;

// Returns whether freeing the memory runs no Python code: it is from torch's allocator, or shared
// memory, for example of a loader's worker.
bool is_freed_without_python(const at::DataPtr& memory) {
  return memory.get_deleter() == c10::GetDefaultCPUAllocator()->raw_deleter() ||
         at::MapAllocator::fromDataPtr(memory) != nullptr;
}

// Returns the storage of a tensor if `object`, our reference, may be the last one to much memory.
c10::Storage storage_of_last(PyObject* object) {
  if (Py_REFCNT(object) != 1 || !is_plain_tensor_class(Py_TYPE(object))) return {};
  const at::Tensor& tensor = tensor_in(object);
  if (!tensor.has_storage() || !tensor.device().is_cpu()) return {};
  return tensor.storage().nbytes() < kMuchBytes ? c10::Storage() : tensor.storage();
}

// Drops our reference to `object`, and takes the memory that nothing else refers to any more. What
// runs at the object's end, such as the finalizer of an attribute, still sees the memory, and may
// refer to it again. GIL: held.
void drop(PyObject* object, Memory& taken) {
  const c10::Storage last = storage_of_last(object);
  Py_DECREF(object);
  if (!last) return;
  c10::StorageImpl* const impl = last.unsafeGetStorageImpl();
  // Python's object for the storage, if there is one, counts as one reference to it.
  PyObject* const wrapper = impl->pyobj_slot()->load_pyobj();
  if (wrapper != nullptr && Py_REFCNT(wrapper) != 1) return;
  if (last.use_count() != (wrapper != nullptr ? 2U : 1U)) return;
  if (!is_freed_without_python(last.data_ptr())) return;
  taken.push_back(impl->set_data_ptr(at::DataPtr(nullptr, last.device())));
}

// Unmapping 64 MB takes some milliseconds. A worker does it for the main thread, which is that of
// most training loops. Other threads do it themselves: waking a worker costs more processor time
// than unmapping 2 MB.
void free_without_gil(Memory taken) {
  if (taken.empty()) return;
  const WithoutGil no_gil;
  if (!is_main_thread()) return taken.clear();
  const auto shared = std::make_shared<Memory>(std::move(taken));
  if (!staging_workers().submit([shared] { shared->clear(); })) shared->clear();
}

int release_in_main_thread(void*) {
  release_returned_sources();
  return 0;
}

}  // namespace

std::vector<std::span<const std::byte>> PySources::memory() const {
  std::vector<std::span<const std::byte>> found;
  found.reserve(memory_.size());
  for (const c10::Storage& each : memory_) {
    found.emplace_back(static_cast<const std::byte*>(each.data()), each.nbytes());
  }
  return found;
}

void PySources::keep_memory_of_tensors() {
  for (PyObject* object : objects_) {
    if (!is_tensor(object)) continue;
    const at::Tensor& tensor = tensor_in(object);
    if (tensor.has_storage()) keep_memory(tensor.storage());
  }
}

void PySources::release() noexcept {
  if (given_back_.exchange(true) || (objects_.empty() && memory_.empty())) return;
  Returned& list = returned();
  {
    const std::lock_guard lock(list.mutex);
    list.copies.push_back({std::move(objects_), std::move(memory_)});
    list.any = true;
  }
  // A Python thread is inside a call of ours, which empties the list at its end. A worker schedules
  // a pending call, which the interpreter runs when the main thread next takes the GIL (any torch
  // call will do). If its queue is full, our next call empties the list.
  const bool is_worker = PyGILState_GetThisThreadState() == nullptr;
  if (is_worker && !list.ending) Py_AddPendingCall(release_in_main_thread, nullptr);
}

void drop_later(PyObject* object) {
  {
    PySources dropped;
    dropped.keep(object);
  }
  // A Python thread may be in code of others: no call of ours that is about to end.
  if (!returned().ending) Py_AddPendingCall(release_in_main_thread, nullptr);
}

void release_returned_sources() {
  Returned& list = returned();
  if (!list.any) return;
  std::vector<Kept> copies;
  {
    const std::lock_guard lock(list.mutex);
    copies.swap(list.copies);
    list.any = false;
  }
  Memory taken;
  for (Kept& kept : copies) {
    kept.memory.clear();
    for (PyObject* object : kept.objects) drop(object, taken);
  }
  free_without_gil(std::move(taken));
}

void stop_returning_sources() {
  returned().ending = true;
}

}  // namespace tdcopier
