// Keeps the Python objects whose bytes a job reads, and gives them up where that is allowed.
#pragma once

#include <torch/csrc/python_headers.h>

#include <atomic>

#include "base/recycled.h"
#include "engine/reclaim.h"

namespace tdcopier {

// Dropping the last reference to a tensor runs Python code and needs the GIL; a worker that waited
// for it could deadlock with a caller that waits for the worker. So sources that a job gives back
// go to a list that the next call, the handle's release or a pending call of the interpreter
// empties.
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

// Drops all that was given back. GIL: held. May run any Python code (finalizers of the sources).
void release_returned_sources();

// Whatever way a call ends: what it gave back is not left lying until the next one.
struct ReleaseAtEnd {
  ~ReleaseAtEnd() { release_returned_sources(); }
};

// From here on workers leave what they give back to the operating system: the interpreter is
// ending.
void stop_returning_sources();

}  // namespace tdcopier
