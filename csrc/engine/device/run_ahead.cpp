// A queue of events on the consumers' streams; the host waits for the oldest when the queue is
// full.
#include "engine/device/run_ahead.h"

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
  ahead_.push_back(std::move(event));
}

bool RunAhead::has_room() {
  const std::lock_guard lock(mutex_);
  // A consumer's stream that has failed reads no more, and its failure is not this copy's.
  while (!ahead_.empty() && has_ended(*ahead_.front())) ahead_.pop_front();
  return ahead_.size() < limit();
}

void RunAhead::wait_for_room() {
  while (!has_room()) {
    EventRef oldest;
    {
      const std::lock_guard lock(mutex_);
      if (ahead_.empty()) return;
      oldest = ahead_.front();
    }
    wait_until_ended(*oldest);
  }
}

}  // namespace tdcopier
