// Keeps alive the Python objects whose memory a job uses, and drops them where the GIL is held.
#pragma once

#include <torch/csrc/python_headers.h>

#include <atomic>

#include "base/recycled.h"
#include "engine/device/reclaim.h"

namespace tdcopier {

// A keep-alive for Python objects. Dropping the last reference to a tensor runs Python code and
// needs the GIL; a worker that waited for the GIL could deadlock with a caller that waits for the
// worker. So release() moves the objects to a list, which the next call, the handle's release or a
// pending call of the interpreter empties.
class PySources final : public KeepAlive {
 public:
  PySources() = default;
  ~PySources() override { release(); }

  void reserve(size_t count) { objects_.reserve(count); }
  // GIL: held. Takes over a reference.
  void keep(PyObject* object) { objects_.push_back(object); }

  void release() noexcept override;
  bool is_released() const noexcept override { return given_back_; }

 private:
  std::atomic<bool> given_back_ = false;
  RecycledVector<PyObject*> objects_;
};

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
