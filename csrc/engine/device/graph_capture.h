// Detects and refuses graph captures, and keeps the engine's calls from breaking those of other
// threads. (torch.compile: tdcopier/_compile.py.)
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>

namespace tdcopier {

// Returns whether `stream` records its work into a graph instead of running it. CUDA only.
bool is_capturing(const c10::Stream& stream);

// Throws std::runtime_error if `stream` is capturing, because a graph cannot replay a copy.
void refuse_capture(const c10::Stream& stream);

// While it exists, this thread's calls do not break captures of other threads, as for example an
// event query would otherwise. CUDA only; for other devices it does nothing. Inside another one it
// makes no call.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(c10::DeviceType type);
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  static inline constinit thread_local bool is_relaxed_ = false;
  int previous_mode_ = -1;  // -1: nothing to restore
};

}  // namespace tdcopier
