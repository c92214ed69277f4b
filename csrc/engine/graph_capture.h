// Graph captures: telling whether a stream is in one, and staying out of those of other threads.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>

namespace tdcopier {

// Is `stream` recording work into a graph instead of running it? CUDA only.
bool is_capturing(const c10::Stream& stream);

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
