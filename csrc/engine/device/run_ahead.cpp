// A queue of events on the consumers' streams; the host waits for the oldest when the queue is
// full.
#include "engine/device/run_ahead.h"

#include <deque>
#include <utility>

#include "engine/device/fallbacks.h"

namespace tdcopier {
namespace {

std::atomic<uint32_t> g_limit = kDefaultRunAheadLimit;

}  // namespace

void RunAhead::set_limit(uint32_t batches) {
  g_limit = batches;
}

uint32_t RunAhead::limit() {
  return g_limit;
}

void RunAhead::note_hand_over(const c10::Stream& stream) {
  EventRef event;
  try {
    event = events_.record(stream);
  } catch (...) {  // the batch is not counted, and the copy is none the worse
    return note_fallback();
  }
  const std::lock_guard lock(mutex_);
  ahead_.push_back({std::move(event), stream});
}

// Queries the device only if the answer matters.
bool RunAhead::has_room() {
  const std::lock_guard lock(mutex_);
  if (ahead_.size() >= limit()) collect_ended();
  return ahead_.size() < limit();
}

void RunAhead::collect() {
  const std::lock_guard lock(mutex_);
  collect_ended();
}

// Usually there is one consumer's stream, and then one query tells that all events have ended. (Two
// threads may note hand-overs on one stream in another order than they recorded them. Then one
// batch more is ahead for a moment.)
void RunAhead::collect_ended() {
  // A consumer's stream that has failed reads no more, and its failure is not this copy's.
  if (!ahead_.empty() && has_ended(*ahead_.back().event)) {
    std::erase_if(ahead_, [stream = ahead_.back().stream](const HandOver& earlier) {
      return earlier.stream == stream;
    });
  }
  while (!ahead_.empty() && has_ended(*ahead_.front().event)) ahead_.pop_front();
}

void RunAhead::wait_for_room() {
  while (!has_room()) {
    EventRef oldest;
    {
      const std::lock_guard lock(mutex_);
      if (ahead_.empty()) return;
      oldest = ahead_.front().event;
    }
    wait_until_ended(*oldest);
  }
}

}  // namespace tdcopier
