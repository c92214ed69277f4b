// How a stream, or the host, waits for what another stream has done: by events, of which a device
// has a pool, because to record a pooled one is far cheaper than to create and destroy one. Which
// stream waits for which is decided in engine/jobs/copy_job.h and in the jobs.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <vector>

namespace tdcopier {

// A recorded event. It returns to its pool when the last reference is dropped.
using EventRef = std::shared_ptr<const c10::Event>;

// Returns whether the device has finished the work that was enqueued before the event, or has
// failed for good. A query that fails for a passing reason, for example another thread's graph
// capture on ROCm, does not count as an end. For callers that only want memory back.
bool has_ended(const c10::Event& event) noexcept;

// Waits for the event. Does not spin for long. Blocks: until the device has reached it. GIL: must
// not be held. Throws: the device's error; Interrupted.
void wait_for(const c10::Event& event);

// The same, but a device error counts as the end.
void wait_until_ended(const c10::Event& event);

// Makes `stream` wait for the event. A device error counts as the end.
void block_until_ended(const c10::Event& event, const c10::Stream& stream);

// Reuses the events of one device. Thread: any. Lifetime: outlives every event that it gave out
// (device state is never destroyed).
class EventPool {
 public:
  explicit EventPool(c10::DeviceType type) : type_(type) {}
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // Records an event on `stream`, after all work that is enqueued there.
  EventRef record(const c10::Stream& stream);

  // The same, for callers that have enqueued work already, whose memory must not be freed early. If
  // no event can be recorded, waits for the stream, counts a fallback, and returns null: nothing is
  // in flight any more. Throws: the device's error, if it has failed.
  EventRef record_or_wait(const c10::Stream& stream);

 private:
  std::unique_ptr<c10::Event> take();

  const c10::DeviceType type_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<c10::Event>> idle_;  // guarded by mutex_
};

}  // namespace tdcopier
