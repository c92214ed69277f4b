// Implements the list of released sources that wait for the GIL.
#include "python/sources.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "python/torch_tensor.h"

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

int release_in_main_thread(void*) {
  release_returned_sources();
  return 0;
}

}  // namespace

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

void release_returned_sources() {
  Returned& list = returned();
  if (!list.any) return;
  std::vector<Kept> copies;
  {
    const std::lock_guard lock(list.mutex);
    copies.swap(list.copies);
    list.any = false;
  }
  for (const Kept& kept : copies) {
    for (PyObject* object : kept.objects) Py_DECREF(object);
  }
}

void stop_returning_sources() {
  returned().ending = true;
}

}  // namespace tdcopier
