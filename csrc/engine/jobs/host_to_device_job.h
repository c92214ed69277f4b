// H2D, to new or existing memory: through pinned staging buffers, or straight from pinned sources,
// on to_device_stream() or ordered_stream() of engine/device/accelerator.h. Sources may be written
// again when they have been staged, or, if the device reads pinned ones in place, when the event
// after its last read has ended (are_sources_free() in copy_job.h). engine/leaves/pinned_leaves.h
// decides which leaves count as pinned: large ones, and long series of small ones.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "base/combiner.h"
#include "base/monitor.h"
#include "base/streaming_copy.h"
#include "engine/device/deferred_batch_memory.h"
#include "engine/device/staging_ring.h"
#include "engine/jobs/copy_job.h"
#include "engine/moves/enqueue_transfers.h"
#include "engine/moves/windows.h"

namespace tdcopier {

// At most this many workers stage a deferred batch. No call waits for it, and beside a loop whose
// host is busy more workers cost the loop more than they save: for 38 MB of rows, 12 workers slow
// it by 5 %, and 4 workers by 4 %.
inline constexpr size_t kMostDeferredParticipants = 4;

// A copy from the host to a device. A participant claims a part of a window, stages it in the
// window's buffer, and goes on to the next; the last one of a window enqueues its transfers, or
// holds them for those of the next window while the device is busy. Copies to new memory of the
// engine's stream never wait for a caller's stream. Existing destinations, and new memory of the
// caller's stream, are written after the work that the caller's current stream of the target has
// when the job is created.
//
// With memory for the whole batch the transfers are deferred: workers stage, and the thread that
// uses the batch enqueues one transfer for each chunk. This is for loops that enqueue kernels all
// the time: the driver admits one thread at a time, and each transfer that a worker enqueues delays
// the loop by about 20 us.
class HostToDeviceJob final : public CopyJob {
 public:
  // `straight`: chunks that the device reads from the sources' memory. If that is to fill existing
  // memory, or is in the caller's order, the caller has promised not to write to the sources before
  // the copy is done, so wait() does not hold the host until they have been read. `windows`: of the
  // other chunks; each fits in a buffer if it is staged. `batch`: memory for the plan's image; the
  // transfers are deferred. Requires then: new memory, and no chunk that is read in place.
  HostToDeviceJob(Accelerator& target, CopyWork work, bool use_pinned_staging,
                  std::vector<size_t> straight, std::vector<Window> windows,
                  std::optional<DeferredLease> batch);

  bool waits_hold_for_reads() const override { return !destinations_ready_ || straight_.empty(); }
  void send() noexcept override;

 private:
  struct StagedWindow {
    size_t window;
    StagingLease lease;
  };
  // A window whose parts are claimed, and its buffer.
  struct OpenWindow {
    std::optional<StagingLease> lease;  // set before a part is claimed; taken with the last one
    std::atomic<size_t> unstaged_parts = 0;
  };

  size_t parts() const override { return parts_.size(); }
  size_t most_participants() const override;
  bool can_be_helped() const override { return true; }
  void transfer_all() override;
  void complete() override;
  void finish() noexcept override;
  void transfer_next();
  void stage_next();
  std::optional<Window> open_next(std::optional<StagingLease>& lease,
                                  std::optional<WindowPart>& part);
  std::optional<WindowPart> claim_part(std::optional<StagingLease>& lease);
  std::optional<Window> claim_window();
  bool needs_buffer() const;
  StagingUse staging_use() const;
  std::optional<StagingLease> lease_buffer(bool pins, bool& is_refused);
  void stage_part(const WindowPart& part);
  void transfer_straight(std::span<const size_t> chunks);
  void copy_unpinned(size_t chunk);
  void transfer_pageable(const Window& window);
  bool is_far_ahead(uint64_t next);
  void stage(const Window& window, std::byte* to, StoreTo store);
  void enqueue(StagedWindow staged);
  bool can_hold(size_t window);
  void send_windows();
  void add_parts(const Window& window, const std::byte* staged, std::vector<Transfer>& transfers);
  void send(std::span<const Transfer> transfers);
  void send_batch();

  std::byte* address(size_t chunk) const;

  const bool use_pinned_staging_;
  const uint32_t generation_;  // of the process that made it: a forked child sends nothing
  // After the work on the caller's stream; null: the memory is new, and the engine's stream's.
  const EventRef destinations_ready_;
  std::vector<c10::Storage> scratch_;   // by chunk, for scattered chunks; empty: there are none
  const std::vector<size_t> straight_;  // claimed in groups
  std::atomic<size_t> next_straight_ = 0;
  const std::vector<Window> windows_;
  // Claimed one by one: whole windows, unless they are staged in the ring.
  const std::vector<WindowPart> parts_;
  Mutex claiming_;
  std::atomic<size_t> opened_ = 0;        // windows that have had a buffer; changed under claiming_
  std::atomic<size_t> refused_ = 0;       // windows among them that got none; changed with it
  std::atomic<bool> is_growing_ = false;  // a participant may pin a buffer
  std::vector<OpenWindow> open_;          // by window; empty: they are not staged in the ring
  Combiner<StagedWindow> staged_;         // the driver admits one thread at a time
  // For the thread in staged_: the windows that were added, and those of them that are not sent.
  size_t added_ = 0;
  std::vector<StagedWindow> unsent_;
  std::optional<DeferredLease> batch_;  // nullopt: the transfers are not deferred
  Mutex sending_;
};

}  // namespace tdcopier
