// All that the engine keeps for one accelerator that copies go to or come from.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <mutex>
#include <optional>

#include "engine/event_pool.h"
#include "engine/held_memory.h"
#include "engine/run_ahead.h"
#include "engine/staging_ring.h"

namespace tdcopier {

// Makes a stream of `device` that no other caller gets. For backends whose streams all come from a
// shared pool, as those of c10's interface may. Call before the device's first copy. Thread: any.
using StreamMaker = c10::Stream (*)(c10::Device device);
void set_stream_maker(c10::DeviceType type, StreamMaker maker);

// Streams of the engine's that wait for those of callers. Copies that follow different ones seldom
// share one, and so do not wait for each other's kernels. Thread: any.
class FollowingStreams {
 public:
  explicit FollowingStreams(c10::Device device) : device_(device) {}
  // The one that follows this stream, always the same.
  const c10::Stream& after(const c10::Stream& callers);

 private:
  struct Made {
    std::once_flag once;
    std::optional<c10::Stream> stream;
  };

  const c10::Device device_;
  std::array<Made, 8> made_;
};

// Thread: any. Lifetime: made at first use, never destroyed: jobs, events and chunks may outlive
// the interpreter's orderly end.
class Accelerator {
 public:
  // `device` has an index, and its backend is initialised; or it is the host, for copies within
  // which nothing of the device is used.
  static Accelerator& of(c10::Device device);

  // Notices in all of them which transfers and consumers have ended.
  static void settle_all();
  // Give back what no transfer, and what none of their held batches, needs just now.
  static void drop_staging();
  static void drop_held_memory();

  const c10::Device& device() const { return device_; }
  // The engine's streams on this device; no other code of the process gets them. H2D copies to new
  // memory go to the first, which never waits for a stream of the caller's.
  const c10::Stream& to_device_stream() const { return to_device_stream_; }
  // Thread: a caller's, for these two: they go with its current stream.
  // Gathers and transfers that leave the device: they wait for what wrote the sources.
  const c10::Stream& from_device_stream() { return from_device_streams_.after(current_stream()); }
  // What waits before it writes: copies into existing memory, and what arrives from other devices.
  const c10::Stream& ordered_stream() { return ordered_streams_.after(current_stream()); }
  EventPool& events() { return events_; }
  // An event behind what the calling thread's current stream of this device has.
  EventRef record_current();
  StagingRing& staging() { return staging_; }
  HeldMemory& held() { return held_; }
  RunAhead& run_ahead() { return run_ahead_; }

 private:
  explicit Accelerator(c10::Device device);
  c10::Stream current_stream() const;  // of the calling thread

  const c10::Device device_;
  const c10::Stream to_device_stream_;
  FollowingStreams from_device_streams_;
  FollowingStreams ordered_streams_;
  EventPool events_;
  StagingRing staging_;
  HeldMemory held_;
  RunAhead run_ahead_;
};

}  // namespace tdcopier
