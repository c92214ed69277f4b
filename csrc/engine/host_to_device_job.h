// H2D, to new memory and to memory that exists: through pinned staging buffers, or straight from
// pinned sources.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "base/combiner.h"
#include "engine/copy_job.h"
#include "engine/held_memory.h"
#include "engine/stage.h"
#include "engine/staging_ring.h"

namespace tdcopier {

// At most this many workers stage a deferred batch. No call waits for it, and beside a loop whose
// host is busy more of them cost the loop more than they save: 38 MB of rows cost it 5 % by 12
// workers, 4 % by 4.
inline constexpr size_t kMostDeferredParticipants = 4;

// Whether the device can read all of this chunk from the sources' memory.
bool is_straight(const ChunkPlan& chunk, const PackPlan& plan, const LeafTable& leaves);

struct HostToDeviceOptions {
  bool use_pinned_staging;
  WindowBytes window_bytes;  // a window fits in a staging buffer
};

// Participants claim windows one by one: fill a staging buffer, enqueue its transfers, go on.
// Copies to new memory never wait for a stream of the caller's. Destinations are written after what
// the caller's current stream of the target has when the job is made.
//
// With memory for the whole batch the transfers are deferred: workers stage, and the thread that
// uses the batch enqueues one transfer for each chunk. That is for loops that enqueue kernels all
// the time: the driver lets one thread in at a time, and workers that call it beside the loop hold
// the loop up by about 20 us for each transfer.
class HostToDeviceJob final : public CopyJob {
 public:
  // `batch`: memory for the plan's image. Requires then: no chunk is straight, new memory.
  HostToDeviceJob(Accelerator& target, CopyWork work, const HostToDeviceOptions& options,
                  std::optional<HeldLease> batch = std::nullopt);

  uint64_t host_bytes() const override { return host_bytes_; }
  size_t chunks() const override;
  void send() noexcept override;

 private:
  struct StagedWindow {
    Window window;
    StagingLease lease;
  };

  size_t most_participants() const override;
  bool can_be_helped() const override { return true; }
  void transfer_all() override;
  void complete() override;
  void finish() noexcept override;
  void transfer_window();
  void transfer_straight(size_t chunk);
  void transfer_pageable(const Window& window);
  void stage(const Window& window, std::byte* to);
  void enqueue(StagedWindow staged);
  void send_parts(const Window& window, const std::byte* staged);
  void send_batch();

  bool goes_straight(const ChunkPlan& chunk) const;
  std::vector<size_t> straight_chunks() const;
  std::vector<Window> make_windows(const WindowBytes& window_bytes) const;
  std::byte* address(size_t chunk) const;

  const bool use_pinned_staging_;
  const uint32_t generation_;           // of the process that made it: a child sends nothing
  const EventRef used_;                 // after what the caller's stream has; null: new memory
  std::vector<c10::Storage> scratch_;   // by chunk, of those that are scattered; empty: none is
  const std::vector<size_t> straight_;  // chunks that are read in place, claimed one by one
  std::atomic<size_t> next_straight_ = 0;
  const std::vector<Window> windows_;  // claimed one by one
  const uint64_t host_bytes_;
  Combiner<StagedWindow> staged_;   // the driver takes one thread at a time
  std::optional<HeldLease> batch_;  // nullopt: the transfers are not deferred, or done
  Mutex sending_;
};

}  // namespace tdcopier
