// Bounds how far the host runs ahead of the streams that consume the copies.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <deque>
#include <mutex>

#include "base/monitor.h"
#include "engine/device/events.h"

namespace tdcopier {

inline constexpr uint32_t kDefaultRunAheadLimit = 4;

// Back-pressure for loops that are bound by the device. A batch that was dropped on the host keeps
// its memory until the device has read it, so such a loop would allocate batch after batch. Each
// hand-over records an event on the consumer's stream; before another copy starts, fewer than
// `limit` of these events may be pending.
//
// Thread: any.
class RunAhead {
 public:
  explicit RunAhead(EventPool& events) : events_(events) {}
  RunAhead(const RunAhead&) = delete;
  RunAhead& operator=(const RunAhead&) = delete;

  // Notes a hand-over on `stream`. The work enqueued there by now consumes the batches handed over
  // before.
  void note_hand_over(const c10::Stream& stream);

  // Waits for room. Blocks: until fewer hand-overs than the limit are ahead of the device. GIL:
  // must not be held.
  void wait_for_room();
  bool has_room();
  // Forgets hand-overs that have ended.
  void collect();

  // Sets the limit for all devices, at least 1. Thread: any.
  static void set_limit(uint32_t batches);
  static uint32_t limit();

 private:
  struct HandOver {
    EventRef event;
    c10::Stream stream;
  };

  void collect_ended();  // requires: mutex_ is held

  EventPool& events_;
  Mutex mutex_;
  std::deque<HandOver> ahead_;  // oldest first, guarded by mutex_
};

}  // namespace tdcopier
