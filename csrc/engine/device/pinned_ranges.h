// Pins host memory that exists, in place: the devices of one type then read and write it without
// staging.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace tdcopier {

// The calls of a device type's driver. Each returns 0 for success, or an error code.
struct PinningCalls {
  int (*pin)(void* begin, size_t bytes);
  int (*unpin)(void* begin);
};

// Replaces the calls for a device type: for the simulation.
void set_pinning_calls(c10::DeviceType type, PinningCalls calls);

// Says which of the ranges cannot be pinned, and why, as text that follows its name in a message.
class PinningError : public std::runtime_error {
 public:
  PinningError(size_t range, const std::string& why) : std::runtime_error(why), range_(range) {}
  size_t range() const { return range_; }

 private:
  size_t range_;
};

// Host memory that is pinned as long as this exists. Memory that several of these name is pinned
// once, and until the last of them is gone. Thread: any.
//
// Exactly the ranges are registered, though the system pins their pages: the driver refuses a
// transfer that begins in registered memory and ends outside of it, or in another registration. So
// a range must not end within memory that is transferred as a whole.
class PinnedRanges {
 public:
  using Range = std::span<const std::byte>;

  // Pins all ranges, or none. Those that overlap are registered as one; empty ones are left out.
  // Blocks: for 50 ms per gigabyte.
  // Requires: the device's type is initialised; the memory outlives this. Throws: PinningError.
  PinnedRanges(c10::Device device, std::span<const Range> ranges);
  // Requires: no device accesses the memory any more.
  ~PinnedRanges();
  PinnedRanges(const PinnedRanges&) = delete;
  PinnedRanges& operator=(const PinnedRanges&) = delete;

  // Returns the size of all these ranges, without what they share.
  uint64_t bytes() const { return bytes_; }

  bool is_of_this_process() const;

  // Returns whether the range is in memory that one of these pins.
  static bool has(Range range);

 private:
  struct Wanted {
    uintptr_t begin;
    uintptr_t end;
    size_t range;  // the first of those in this memory
  };
  void hold(const Wanted& wanted);
  void release() noexcept;

  const c10::Device device_;
  const uint32_t generation_;    // of the process that pinned them: a forked child unpins none
  std::vector<uintptr_t> held_;  // beginnings of registrations
  uint64_t bytes_ = 0;
};

}  // namespace tdcopier
