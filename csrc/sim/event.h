// An event: a marker in a stream's work.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "sim/note.h"
#include "sim/stream_queue.h"

namespace tdcopier::sim {

// An event as in CUDA. Enqueued waits refer to the marker, not to the event: neither recording the
// event again nor destroying it changes them. Thread: any.
class Event {
 public:
  explicit Event(bool timed) : timed_(timed) {}

  void record(StreamQueue& stream);

  // Makes the stream's later operations wait for the most recent record, if there is one.
  void block(StreamQueue& stream) const;

  // Returns whether the most recent record has been reached; true if there is none.
  bool query() const;
  void synchronize() const;

  // Returns the milliseconds between the most recent records of two events, each of which must be
  // timed, recorded and reached.
  static double elapsed_milliseconds(const Event& start, const Event& end);

 private:
  struct Marker {
    Point point;
    std::shared_ptr<std::int64_t> reached_at;  // nanoseconds; written before the point is passed
    std::shared_ptr<const Note> note;          // null: no detection was on

    const Clock* clock() const { return note ? note->reached.get() : nullptr; }
  };

  Marker marker() const;

  const bool timed_;
  mutable std::mutex mutex_;
  Marker marker_;
};

}  // namespace tdcopier::sim
