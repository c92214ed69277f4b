// All that the engine keeps for one device that copies go to.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "engine/event_pool.h"
#include "engine/run_ahead.h"
#include "engine/staging_ring.h"

namespace tdcopier {

// Thread: any. Lifetime: made at first use, never destroyed: jobs, events and chunks may outlive
// the interpreter's orderly end.
class TargetDevice {
 public:
  // `device` has an index, and its backend is initialised.
  static TargetDevice& of(c10::Device device);

  const c10::Device& device() const { return device_; }
  const c10::Stream& copy_stream() const { return copy_stream_; }
  EventPool& events() { return events_; }
  StagingRing& staging() { return staging_; }
  RunAhead& run_ahead() { return run_ahead_; }

  // `bytes` whose base address is a multiple of `alignment_bytes` after `*shift_bytes` bytes. The
  // memory belongs to the copy stream: no consumer's queue holds up the copy that writes it, and
  // whoever reads it elsewhere must be recorded on it. Requires: the copy stream is current.
  c10::Storage allocate(uint64_t bytes, uint64_t alignment_bytes, uint64_t* shift_bytes) const;

  // A resizable storage of no bytes.
  c10::Storage empty_storage() const;

 private:
  explicit TargetDevice(c10::Device device);

  const c10::Device device_;
  const c10::Stream copy_stream_;
  EventPool events_;
  StagingRing staging_;
  RunAhead run_ahead_;
};

}  // namespace tdcopier
