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

// Whether, and until, the device does no more of what is before the event: it is done with that, or
// it has failed. For whoever only wants the memory back; how it failed is for others to say.
bool has_ended(const c10::Event& event) noexcept;
void wait_until_ended(const c10::Event& event);  // Blocks. GIL: must not be held.
void block_until_ended(const c10::Event& event, const c10::Stream& stream);  // `stream` waits

// Thread: any. Lifetime: outlives every event that it gave out (device state is never destroyed).
class EventPool {
 public:
  explicit EventPool(c10::DeviceType type) : type_(type) {}
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // An event recorded on `stream` just now, behind all that is enqueued there.
  EventRef record(const c10::Stream& stream);

 private:
  std::unique_ptr<c10::Event> take();

  const c10::DeviceType type_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<c10::Event>> idle_;  // guarded by mutex_
};

}  // namespace tdcopier
