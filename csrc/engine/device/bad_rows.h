// Reports row numbers that were out of range, which a device finds long after the call.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>

#include "base/row_moves.h"
#include "engine/device/events.h"

namespace tdcopier {

// Returns "is 1 row" or "are 2 rows", for messages.
std::string counted_rows(int64_t rows);

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
  // Sets the event after which the device writes no more; null: it does not already. Without this
  // call, the report is kept for good.
  void ends_with(EventRef end);
  bool has_end() const { return use_ != Use::kUnknown; }
  // Says that a graph has been captured, whose replays write at any time. The report is then kept
  // for good.
  void is_replayed() { use_ = Use::kByGraph; }
  // Says that the call has failed: no other one raises the error.
  void is_of_failure() { raised_ = true; }

  // Throws std::out_of_range with the first number that was out of range, if the device has
  // reported one: every time, or once if it may write another one.
  void raise_if_bad();

  // Throws the error of a watch that was dropped, once; that of a captured copy after each replay
  // that found one, if need be some calls later. A forked child leaves that to its parent.
  static void raise_of_dropped();

 private:
  enum class Use : uint8_t { kUnknown, kUntilEvent, kByGraph };

  const c10::DeviceType type_;
  BadRow* const report_;
  const int64_t rows_;
  Use use_ = Use::kUnknown;
  EventRef end_;
  bool raised_ = false;
};

}  // namespace tdcopier
