// How long transfers take.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "sim/counters.h"

namespace tdcopier::sim {

// Gives the transfers of one direction that are enqueued while it lasts a time that they take. The
// last one that was begun counts. Any thread may call any member.
class Pace {
 public:
  static std::shared_ptr<Pace> begin(Direction direction, double latency_us,
                                     double bytes_per_second);  // infinity: no bound
  void end();

 private:
  friend std::chrono::nanoseconds transfer_time(Direction direction, std::size_t bytes);
  Pace(Direction direction, double latency_us, double bytes_per_second)
      : direction_(direction), latency_us_(latency_us), bytes_per_second_(bytes_per_second) {}

  const Direction direction_;
  const double latency_us_;
  const double bytes_per_second_;
};

// What a transfer that is enqueued now takes; 0 where no pace is set.
std::chrono::nanoseconds transfer_time(Direction direction, std::size_t bytes);

}  // namespace tdcopier::sim
