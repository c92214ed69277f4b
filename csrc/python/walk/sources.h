// Keeps alive the Python objects whose memory a job uses, and drops them where the GIL is held.
#pragma once

#include <torch/csrc/python_headers.h>

#include <c10/core/Storage.h>

#include <atomic>
#include <cstddef>
#include <span>
#include <vector>

#include "base/recycled.h"
#include "engine/device/reclaim.h"

namespace tdcopier {

// A keep-alive for Python objects. Dropping the last reference to a tensor runs Python code and
// needs the GIL, as the memory of an array does; a worker that waited for the GIL could deadlock
// with a caller that waits for the worker. So release() moves the objects to a list, which the next
// call, the handle's release or a pending call of the interpreter empties.
class PySources final : public KeepAlive {
 public:
  PySources() = default;
  ~PySources() override { release(); }

  void reserve(size_t count) { objects_.reserve(count); }
  // GIL: held. Takes over a reference.
  void keep(PyObject* object) { objects_.push_back(object); }
  // Keeps memory, but not the tensor over it: the collector finds a cycle through the tensor, and
  // code that gives the tensor other memory does not free this one.
  void keep_memory(const c10::Storage& storage) {
    const c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
    if (!memory_.empty() && memory_.back().unsafeGetStorageImpl() == impl) return;  // of a chunk
    memory_.push_back(storage);
  }
  // Keeps the memory of the tensors that it keeps. GIL: held.
  void keep_memory_of_tensors();

  // The memory that keep_memory() keeps, as it is now.
  std::vector<std::span<const std::byte>> memory() const;

  void release() noexcept override;
  bool is_released() const noexcept override { return given_back_; }

 private:
  std::atomic<bool> given_back_ = false;
  RecycledVector<PyObject*> objects_;
  RecycledVector<c10::Storage> memory_;
};

// Drops an object once a thread has the GIL: in the next call, or as the main thread's pending one.
// Takes over a reference. GIL: not held.
void drop_later(PyObject* object);

// Drops all objects on that list. GIL: held. May run any Python code (finalizers of the sources).
void release_returned_sources();

// Empties the list when a call ends, normally or with an exception.
struct ReleaseAtEnd {
  ~ReleaseAtEnd() { release_returned_sources(); }
};

// Stops workers from scheduling pending calls, because the interpreter is shutting down. Sources
// that they release from then on may leak.
void stop_returning_sources();

}  // namespace tdcopier
