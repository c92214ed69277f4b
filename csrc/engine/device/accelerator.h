// The engine's state for one accelerator: its streams, events, pinned memory and run-ahead limit.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <mutex>
#include <optional>

#include "engine/device/deferred_batch_memory.h"
#include "engine/device/events.h"
#include "engine/device/run_ahead.h"
#include "engine/device/staging_ring.h"

namespace tdcopier {

// Returns a stream of `device` that no other code gets.
using StreamMaker = c10::Stream (*)(c10::Device device);

// Sets the stream maker of a backend whose c10 interface gives out only streams of a shared pool.
// Call before the device's first copy. Thread: any.
void set_stream_maker(c10::DeviceType type, StreamMaker maker);

// Maps callers' streams to a few engine streams that wait for them. Copies that wait for different
// callers' streams seldom share an engine stream, so they seldom wait for each other's kernels.
// Thread: any.
class FollowingStreams {
 public:
  explicit FollowingStreams(c10::Device device) : device_(device) {}
  // Returns the engine stream for this caller's stream, always the same one.
  const c10::Stream& after(const c10::Stream& callers);

 private:
  struct Made {
    std::once_flag once;
    std::optional<c10::Stream> stream;
  };

  const c10::Device device_;
  std::array<Made, 8> made_;
};

// The engine's state for one device. Thread: any. Lifetime: created at first use and never
// destroyed, since jobs, events and chunks may outlive the interpreter's orderly shutdown.
class Accelerator {
 public:
  // Returns the accelerator of `device`. Requires: `device` has an index and its backend is
  // initialised; or it is the host, for H2H copies, which use no device state.
  static Accelerator& of(c10::Device device);

  // Updates, for all accelerators, which transfers and consumers have ended.
  static void poll_all();
  // Returns the pinned memory of all accelerators that stages, deferred batches included.
  static uint64_t staging_bytes_of_all();
  // Free the pinned memory of all accelerators that is not in use: staging buffers, and memory for
  // deferred batches.
  static void drop_staging();
  static void drop_deferred_memory();

  const c10::Device& device() const { return device_; }
  // The engine's streams on this device, which no other code in the process gets.

  // For H2D copies to new memory. Never waits for a caller's stream.
  const c10::Stream& to_device_stream() const { return to_device_stream_; }

  // The next two depend on the calling thread's current stream. Thread: a caller's.

  // For gathers and transfers that leave the device: they wait for the work that wrote the sources.
  const c10::Stream& from_device_stream() { return from_device_streams_.after(current_stream()); }
  // For work that waits before it writes: copies into existing memory, and from other devices.
  const c10::Stream& ordered_stream() { return ordered_streams_.after(current_stream()); }

  EventPool& events() { return events_; }
  // Records an event after the work on the calling thread's current stream of this device.
  EventRef record_current();
  StagingRing& staging() { return staging_; }
  DeferredBatchMemory& deferred() { return deferred_; }
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
  DeferredBatchMemory deferred_;
  RunAhead run_ahead_;
};

}  // namespace tdcopier
