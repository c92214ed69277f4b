// Pooled events: taken, recorded once, given back by the deleter of the last reference.
#include "engine/event_pool.h"

#include <c10/util/Exception.h>

#include <utility>

#include "engine/graph_capture.h"

namespace tdcopier {

bool has_ended(const c10::Event& event) noexcept {
  const RelaxedCapture relaxed(event.device_type());
  try {
    return event.query();
  } catch (...) {
    return true;
  }
}

void wait_until_ended(const c10::Event& event) {
  const RelaxedCapture relaxed(event.device_type());
  try {
    event.synchronize();
  } catch (const c10::Error&) {  // it has ended
  }
}

void block_until_ended(const c10::Event& event, const c10::Stream& stream) {
  const RelaxedCapture relaxed(event.device_type());
  try {
    event.block(stream);
  } catch (const c10::Error&) {  // it has ended
  }
}

std::unique_ptr<c10::Event> EventPool::take() {
  const std::lock_guard lock(mutex_);
  if (idle_.empty()) return nullptr;
  std::unique_ptr<c10::Event> event = std::move(idle_.back());
  idle_.pop_back();
  return event;
}

EventRef EventPool::record(const c10::Stream& stream) {
  std::unique_ptr<c10::Event> event = take();
  if (!event) event = std::make_unique<c10::Event>(type_);
  event->record(stream);
  return {event.release(), [this](const c10::Event* used) {
            const std::lock_guard lock(mutex_);
            idle_.emplace_back(const_cast<c10::Event*>(used));
          }};
}

}  // namespace tdcopier
