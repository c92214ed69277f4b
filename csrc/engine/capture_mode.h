// Keeps the engine's device calls from invalidating a graph capture that runs on another thread.
#pragma once

#include <c10/core/DeviceType.h>

namespace tdcopier {

// While it lives, this thread's calls do not count as unsafe for captures elsewhere. CUDA only; for
// other devices it does nothing. Without it an event query here breaks a capture over there.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(c10::DeviceType type);
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int previous_mode_ = -1;  // -1: nothing to restore
};

}  // namespace tdcopier
