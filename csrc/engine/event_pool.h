// Events of one device, reused: recording a pooled one is far cheaper than creating and destroying
// it.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <vector>

namespace tdcopier {

// A recorded event. It returns to its pool when the last reference goes.
using EventRef = std::shared_ptr<const c10::Event>;

// Whether the device does no more of what was enqueued before the event: it has done it, or it has
// failed for good. A query that fails for a reason of its own is asked again later, as while a
// graph is captured by another thread on ROCm. For callers that only want the memory back.
bool has_ended(const c10::Event& event) noexcept;

// Blocks: until the device has come to the event. Does not spin for long. GIL: must not be held.
// Throws: the device's error; Interrupted.
void wait_for(const c10::Event& event);

// The same, but a device's error counts as the end.
void wait_until_ended(const c10::Event& event);

void block_until_ended(const c10::Event& event, const c10::Stream& stream);  // `stream` waits

// Thread: any. Lifetime: outlives every event that it gave out (device state is never destroyed).
class EventPool {
 public:
  explicit EventPool(c10::DeviceType type) : type_(type) {}
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // An event recorded on `stream` just now, after all that is enqueued there.
  EventRef record(const c10::Stream& stream);

  // The same for callers that have enqueued something already, which must not be forgotten. Where
  // no event can be recorded, waits for the stream, which is counted as a fallback, and returns
  // null: nothing is in flight any more. Throws: the device's error, if it has failed.
  EventRef record_or_wait(const c10::Stream& stream);

 private:
  std::unique_ptr<c10::Event> take();

  const c10::DeviceType type_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<c10::Event>> idle_;  // guarded by mutex_
};

}  // namespace tdcopier
