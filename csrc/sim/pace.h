// Sets how long transfers take.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "sim/counters.h"

namespace tdcopier::sim {

// The time that transfers of one direction take if they are enqueued between begin() and end(). The
// pace that began last applies. Thread: any.
class Pace {
 public:
  static std::shared_ptr<Pace> begin(Direction direction, double latency_us,
                                     double bytes_per_second);  // infinity: no limit
  void end();

 private:
  friend std::chrono::nanoseconds transfer_time(Direction direction, std::size_t bytes);
  Pace(Direction direction, double latency_us, double bytes_per_second)
      : direction_(direction), latency_us_(latency_us), bytes_per_second_(bytes_per_second) {}

  const Direction direction_;
  const double latency_us_;
  const double bytes_per_second_;
};

// Returns the time that a transfer takes if it is enqueued now; 0 without a pace.
std::chrono::nanoseconds transfer_time(Direction direction, std::size_t bytes);

}  // namespace tdcopier::sim
