// All that the engine keeps for one accelerator that copies go to or come from.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "engine/byte_views.h"
#include "engine/event_pool.h"
#include "engine/held_memory.h"
#include "engine/run_ahead.h"
#include "engine/staging_ring.h"

namespace tdcopier {

// Thread: any. Lifetime: made at first use, never destroyed: jobs, events and chunks may outlive
// the interpreter's orderly end.
class Accelerator {
 public:
  // `device` has an index, and its backend is initialised; or it is the host, for copies within
  // which nothing of the device is used.
  static Accelerator& of(c10::Device device);

  // Notices in all of them which transfers and consumers have ended.
  static void settle_all();
  // Gives back what none of their held batches needs just now.
  static void drop_held_memory();

  const c10::Device& device() const { return device_; }
  // Where the engine enqueues all its work on this device.
  const c10::Stream& copy_stream() const { return copy_stream_; }
  EventPool& events() { return events_; }
  // An event behind what the calling thread's current stream of this device has.
  EventRef record_current();
  StagingRing& staging() { return staging_; }
  HeldMemory& held() { return held_; }
  RunAhead& run_ahead() { return run_ahead_; }
  ByteViewPool& views() { return views_; }

 private:
  explicit Accelerator(c10::Device device);

  const c10::Device device_;
  const c10::Stream copy_stream_;
  EventPool events_;
  StagingRing staging_;
  HeldMemory held_;
  RunAhead run_ahead_;
  ByteViewPool views_;
};

}  // namespace tdcopier
