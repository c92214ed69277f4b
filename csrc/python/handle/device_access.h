// What a device still reads or writes in memory in place, apart from the handle and its result,
// whose order with the caller's streams is made by Handle::wait().
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <vector>

#include "engine/device/events.h"

namespace tdcopier {

// The accesses of a copy to memory that its caller owns: the device's reads of the sources, or its
// writes to the destinations. It keeps no memory alive. A forked child may drop it, unlike torch's
// events. Thread: any. GIL: held for every member; released inside while waiting.
class DeviceAccess {
 public:
  // `ends`: events of `device` after the accesses.
  DeviceAccess(c10::Device device, std::vector<EventRef> ends);
  // The accesses that are enqueued on `stream` by now. If no event can be recorded, waits for them.
  explicit DeviceAccess(const c10::Stream& stream);
  ~DeviceAccess();
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;

  // A device that has failed accesses nothing any more, and a forked child has no accesses.
  bool has_ended();
  void wait();  // Blocks. Throws: Interrupted.
  // Makes the calling thread's current stream of the device wait.
  void order();

 private:
  const c10::Device device_;
  const uint32_t generation_;  // fork generation of the process that made it
  std::vector<EventRef> ends_;
};

}  // namespace tdcopier
