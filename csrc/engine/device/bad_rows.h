// Reports row numbers that were out of range, which a device finds long after the call.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>

#include "base/row_moves.h"
#include "engine/device/event_pool.h"

namespace tdcopier {

// Watches the numbers of one copy, or of one capture in a graph. If it is dropped before the device
// has reported, raise_of_dropped() raises the error instead. Thread: any.
class BadRowWatch {
 public:
  // Requires: the device's type is initialised. May allocate pinned memory. `rows`: of a table.
  BadRowWatch(c10::Device device, int64_t rows);
  ~BadRowWatch();
  BadRowWatch(const BadRowWatch&) = delete;
  BadRowWatch& operator=(const BadRowWatch&) = delete;

  // What the device writes. It stays valid after the watch is gone.
  BadRow* report() { return report_; }
  // Sets the event after which the device writes no more. Without, it may write at any time.
  void ends_with(EventRef end) { end_ = std::move(end); }

  // Throws std::out_of_range with the first number that was out of range, if the device has
  // reported one: every time, or once if it may write another one.
  void raise_if_bad();

  // Throws the error of a watch that was dropped, once.
  static void raise_of_dropped();

 private:
  BadRow* const report_;
  const int64_t rows_;
  EventRef end_;
  bool raised_ = false;
};

}  // namespace tdcopier
