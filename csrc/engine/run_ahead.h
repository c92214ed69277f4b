// Bounds how far the host runs ahead of the streams that consume the copies.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <deque>
#include <mutex>

#include "base/monitor.h"
#include "engine/event_pool.h"

namespace tdcopier {

inline constexpr uint32_t kDefaultRunAheadLimit = 4;

// A batch that was dropped on the host lives on until the device has read it. A loop that is bound
// by the device would enqueue, and so allocate, batch after batch. Each hand-over leaves an event
// on the consumer's stream; before another copy starts, all but `limit` of them must have been
// passed.
//
// Thread: any.
class RunAhead {
 public:
  explicit RunAhead(EventPool& events) : events_(events) {}
  RunAhead(const RunAhead&) = delete;
  RunAhead& operator=(const RunAhead&) = delete;

  // A hand-over on `stream`: what was handed over before is consumed by what is enqueued there by
  // now.
  void note_hand_over(const c10::Stream& stream);

  // Blocks: until fewer hand-overs than the limit are ahead of the device. GIL: must not be held.
  void wait_for_room();
  bool has_room();

  // At least 1; all devices. Thread: any.
  static void set_limit(uint32_t batches);
  static uint32_t limit();

 private:
  EventPool& events_;
  Mutex mutex_;
  std::deque<EventRef> ahead_;  // oldest first, guarded by mutex_
};

}  // namespace tdcopier
