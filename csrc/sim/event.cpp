// Implements events as positions in a stream's work.
#include "sim/event.h"

#include <c10/util/Exception.h>

#include <chrono>

#include "sim/faults.h"
#include "sim/schedule.h"
#include "sim/tracker.h"

namespace tdcopier::sim {

void Event::record(StreamQueue& stream) {
  auto reached_at = std::make_shared<std::int64_t>(0);
  Operation reach{"event", [reached_at] {
                    *reached_at = std::chrono::duration_cast<std::chrono::nanoseconds>(
                                      std::chrono::steady_clock::now().time_since_epoch())
                                      .count();
                  }};
  if (Tracker::is_on()) {
    reach.note = std::make_shared<Note>();
    reach.note->wants_reached = true;
  }
  const auto note = reach.note;
  const auto position = stream.enqueue(std::move(reach));
  const std::lock_guard lock(mutex_);
  marker_ = {Point{&stream, position}, std::move(reached_at), note};
}

void Event::block(StreamQueue& stream) const {
  const auto marker = this->marker();
  const auto& point = marker.point;
  // A stream need not wait for itself: its earlier work runs before anyway.
  if (point.stream == nullptr || point.stream == &stream) return;
  const auto* const clock = Tracker::is_on() ? marker.clock() : nullptr;
  if (point.passed()) {
    if (clock != nullptr) Tracker::get().stream_waits(stream, *clock);
    point.check();  // like CUDA's calls, reports a known failure at once
    return;
  }
  Operation wait{"wait", [point] { point.wait(); }, [point] { return point.passed(); }};
  if (clock != nullptr) {
    wait.note = std::make_shared<Note>();
    wait.note->awaited = marker.note->reached;
  }
  stream.enqueue(std::move(wait));
}

bool Event::query() const {
  Schedule::get().point();
  const auto marker = this->marker();
  if (marker.point.stream != nullptr) strike_event_query(marker.point.stream->device());
  if (!marker.point.passed()) return false;
  if (Tracker::is_on()) Tracker::get().host_knows(marker.clock());
  marker.point.check();
  return true;
}

void Event::synchronize() const {
  const auto marker = this->marker();
  marker.point.wait();
  if (Tracker::is_on()) Tracker::get().host_knows(marker.clock());
}

double Event::elapsed_milliseconds(const Event& start, const Event& end) {
  TORCH_CHECK(start.timed_ && end.timed_, "both events must be created with timing enabled");
  const auto first = start.marker();
  const auto second = end.marker();
  TORCH_CHECK(first.reached_at && second.reached_at, "both events must have been recorded");
  TORCH_CHECK(first.point.passed() && second.point.passed(),
              "both events must have completed before the elapsed time can be measured");
  return static_cast<double>(*second.reached_at - *first.reached_at) / 1e6;
}

Event::Marker Event::marker() const {
  const std::lock_guard lock(mutex_);
  return marker_;
}

}  // namespace tdcopier::sim
