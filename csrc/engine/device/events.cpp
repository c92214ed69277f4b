// Takes pooled events, records each once, and gives it back in the deleter of the last reference.
#include "engine/device/events.h"

#include <c10/util/Exception.h>

#include <utility>

#include "base/interleaver.h"
#include "base/polling_wait.h"
#include "engine/device/fallbacks.h"
#include "engine/device/graph_capture.h"

namespace tdcopier {
namespace {

// cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread; HIP has the same numbers.
bool is_about_a_capture(const c10::Error& error) {
  const auto* const told = dynamic_cast<const c10::AcceleratorError*>(&error);
  return told != nullptr && told->get_error_code() >= 900 && told->get_error_code() <= 908;
}

}  // namespace

bool has_ended(const c10::Event& event) noexcept {
  constexpr int kTries = 3;  // a device that has failed fails each query
  const RelaxedCapture relaxed(event.device_type());
  for (int i = 0; i < kTries; ++i) {
    try {
      return event.query();
    } catch (const c10::Error& error) {
      if (is_about_a_capture(error)) return false;
    } catch (...) {
    }
  }
  return true;
}

void wait_for(const c10::Event& event) {
  const RelaxedCapture relaxed(event.device_type());
  if (!is_interleaved()) poll_until([&event] { return has_ended(event); });
  event.synchronize();
}

void wait_until_ended(const c10::Event& event) {
  const RelaxedCapture relaxed(event.device_type());
  if (!is_interleaved()) return poll_until([&event] { return has_ended(event); });
  try {
    event.synchronize();
  } catch (const c10::Error&) {  // counts as the end
  }
}

void block_until_ended(const c10::Event& event, const c10::Stream& stream) {
  const RelaxedCapture relaxed(event.device_type());
  try {
    event.block(stream);
  } catch (const c10::Error&) {  // counts as the end
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
  // Make the reference first: nothing that may fail comes after the record.
  EventRef recorded(event.release(), [this](const c10::Event* used) {
    const std::lock_guard lock(mutex_);
    idle_.emplace_back(const_cast<c10::Event*>(used));
  });
  const_cast<c10::Event&>(*recorded).record(stream);
  return recorded;
}

EventRef EventPool::record_or_wait(const c10::Stream& stream) {
  const RelaxedCapture relaxed(type_);
  try {
    return record(stream);
  } catch (...) {
    note_fallback();
  }
  const InterruptibleWaits to_the_end(nullptr);
  if (!is_interleaved()) poll_until([&stream] { return stream.query(); });
  stream.synchronize();
  return nullptr;
}

}  // namespace tdcopier
